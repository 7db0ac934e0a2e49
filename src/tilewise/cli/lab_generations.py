"""stub"""


def generations() -> None:
    """Stub.

    Example: `tilewise lab generations`
    """
