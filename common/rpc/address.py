"""What an address says of who may reach it."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. A name other than localhost may stand for anything: False."""
    bare = host.removeprefix("[").removesuffix("]")
    if bare.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False
