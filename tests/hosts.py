"""Network namespaces as hosts: each has an address of its own, and a link that can be throttled or cut.

Needs Linux, root, `ip` and `tc` (iproute2); `possible()` tells.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass


def run_command(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def can_make_hosts() -> bool:
    """Whether namespaces can be made here."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"pt{os.getpid()}try"
    try:
        run_command("ip", "netns", "add", name)
        run_command("ip", "netns", "del", name)
    except subprocess.CalledProcessError:
        return False
    return True


@dataclass(frozen=True)
class Hosts:
    """Namespaces on one bridge, which is in a namespace of its own."""

    tag: str
    count: int

    def name(self, host: int) -> str:
        return f"{self.tag}h{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command, run on a host."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def throttle(self, mbit: float) -> None:
        """Each host sends at most so much. As many frames wait as Linux lets wait for a network card, 1,000: with a
        tenth of that, one packet in eight of four hosts was thrown away before it left."""
        for host in range(self.count):
            limit = ["rate", f"{mbit}mbit", "burst", "64kb", "limit", f"{1000 * 1514}"]
            run_command(
                *self.command(
                    host, ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit]
                )
            )

    def cut(self, host: int) -> None:
        """From now on all that a host sends is lost, and it gets nothing, without a word."""
        run_command("ip", "netns", "exec", f"{self.tag}b", "ip", "link", "set", f"p{host}", "down")

    def environment(self, rank: int, ranks: int, port: int) -> dict[str, str]:
        """The variables of torchrun."""
        variables = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
        variables |= {"LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(port)}
        return variables | {"MASTER_ADDR": self.address(0), "GLOO_SOCKET_IFNAME": "eth0"}


@contextmanager
def network_hosts(count: int) -> Iterator[Hosts]:
    cluster = Hosts(f"pt{os.getpid()}", count)
    bridge = f"{cluster.tag}b"
    try:
        run_command("ip", "netns", "add", bridge)
        inside = ["ip", "netns", "exec", bridge]
        run_command(*inside, "ip", "link", "add", "br0", "type", "bridge")
        run_command(*inside, "ip", "link", "set", "br0", "up")
        for host in range(count):
            name = cluster.name(host)
            run_command("ip", "netns", "add", name)
            peer = ["type", "veth", "peer", "name", "eth0", "netns", name]
            run_command("ip", "-n", bridge, "link", "add", f"p{host}", *peer)
            run_command(*inside, "ip", "link", "set", f"p{host}", "master", "br0", "up")
            address = ["address", "add", f"{cluster.address(host)}/24", "dev", "eth0"]
            run_command(*cluster.command(host, ["ip", *address]))
            for device in ("eth0", "lo"):
                run_command(*cluster.command(host, ["ip", "link", "set", device, "up"]))
        yield cluster
    finally:
        for name in (*map(cluster.name, range(count)), bridge):
            with suppress(subprocess.CalledProcessError):
                run_command("ip", "netns", "del", name)
