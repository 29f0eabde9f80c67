"""The optional side of a swarm: workers started on one machine, introductions, and reports.

Nothing here is on the data path or imports torch; training goes on without any of it.

    cli.py             the commands
    records.py         what is known of each worker, from its events (`protos.events`)
    report.py          the document on all workers at the end; printer.py is its text
    report_files.py    the files that a run leaves, and the report of its folder
    asking.py          asks any peer, and through it all that it knows
    terminal.py        shows what it knows, once or again and again

    launch.py          the options of `murmur swarm` as command lines of workers
    supervisor.py      runs them to their end; processes.py and die_with_parent.py are its children
    shaping_proxy.py   slow links of workers, made in a process of its own
    registry.py        introductions, as a state machine; rendezvous.py serves it
"""
