"""absl binaries, one per job; `cli.py` has them as commands of `rljax`."""
