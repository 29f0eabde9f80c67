"""Views of a run for a person: words, a table, a page in a browser. Nothing here imports torch.

lines.py    events as lines
summary.py  each peer in short, and all of them: the table and the figures that every view draws
table.py    tables on a terminal, and as text
history.py  what the peers have said so far, within bounds
place.py    where the page is served, and the secret that its readers show
page.py     the page: it asks the peers again and again, and serves what they say
static/     the page in a browser; uPlot, which draws its curves, is Leon Sorokin's (MIT)

A web server takes time to import: a caller that serves imports `worker.views.page` itself.
"""

from murmuration.worker.views.place import PagePlace, page_event, page_words

__all__ = ["PagePlace", "page_event", "page_words"]
