"""A command as somebody types it, for tests: what it prints, and the code that it ends with."""

from regard.cli import main


def run_command(capsys, *words, code=0, main=main):
    """The streams of a command, which ends with this code."""
    found = main([*map(str, words)])
    streams = capsys.readouterr()
    assert found == code, streams.out + streams.err
    return streams
