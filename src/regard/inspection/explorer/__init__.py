"""The explorer of traces: one page to look around in, as an offline file or served with exact tiles.

Start from `pages.write`, which writes the file, `pages.html`, which returns its text, and `server.serve`,
which serves it on this machine. The page's style and scripts lie in `web`.
"""

from typing import TYPE_CHECKING

from regard.loading import defer

if TYPE_CHECKING:
    from regard.inspection.explorer import live, pages, server

__all__ = ["live", "pages", "server"]

__getattr__, __dir__ = defer(__name__, "look", __all__)
