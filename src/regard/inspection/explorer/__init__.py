"""The explorer: a trace as one page to look around in, offline or served with exact tiles.

`payload` collects what the page shows, `pages` writes it with the style and script that lie in `web`, and
`server` serves it on this machine.
"""
