"""Processes that are there: one that ends while it is looked at is not."""

import psutil


def is_running(process: int | psutil.Process) -> bool:
    """Returns whether a process, or one of that number, is there and no zombie."""
    try:
        return (psutil.Process(process) if isinstance(process, int) else process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running_children() -> list[psutil.Process]:
    """Lists the processes below this one, to any depth."""
    return [child for child in psutil.Process().children(recursive=True) if is_running(child)]
