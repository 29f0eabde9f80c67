"""The page of a swarm: its peers, links, losses and rounds, in a browser.

place.py    where it is served, and the secret that its readers show
history.py  what the peers have said so far, within bounds
app.py      the routes: files of the page, and the history as JSON
server.py   asks the peers again and again, and serves
static/     the page itself; uPlot, which draws its curves, is Leon Sorokin's (MIT)

A web server takes time to import: whoever serves imports `protos.web.server` itself.
"""

from protos.web.place import PagePlace, page_event, page_words

__all__ = ["PagePlace", "page_event", "page_words"]
