"""The explorer: a trace as one page to look around in, offline or served with exact tiles.

Start from `pages.write`, which makes the page from the style and script in `web`, and `server.serve`, which
serves it on this machine; `payload` collects what the page shows.
"""

from typing import TYPE_CHECKING

from regard.loading import defer

if TYPE_CHECKING:
    from regard.inspection.explorer import pages, server

__all__ = ["pages", "server"]

__getattr__, __dir__ = defer(__name__, "look", __all__)
