"""stub"""


def memory() -> None:
    """Stub.

    Example: `tilewise lab memory`
    """
