"""Ranks on other hosts: a process here stands in for each, and carries what it and its engine have to say.

    python -m nibble.engine.rank_hosts CONNECTION COUNTS RANK SIZE      what the engine starts in place of such a rank

On the other host a RankHost waits for that process, starts the rank as the engine would have (engine/rank.py), and
passes on what each side says, with what the rank notes of its work and that it lives. So rank 0 sees ranks of its own
host alone, and a connection that ends, on either side and for any reason, ends the rank and its stand-in. What layers
send one another does not go this way: collectives connect the hosts themselves.

Who starts a RankHost, and where, is a cluster's business (nibble/ray/app.py): it tells the engine of them by a variable
of its process, NIBBLE_RANK_HOSTS. A RankHost runs whatever who has its key wants, and nothing is encrypted: the hosts'
network is trusted, as collectives trust it anyway.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import nibble
from nibble.engine.ranks import BEAT_S, COUNT, KILL_S, Failure, Place
from nibble.errors import ConfigError
from nibble.processes import ending

VARIABLE = "NIBBLE_RANK_HOSTS"
MESSAGE, COUNTS, END = b"m", b"c", b"e"
"""What a RankHost sends: a message of the rank, what it has noted, how its process ended."""


@dataclass(frozen=True, slots=True)
class RankHosts:
    """The hosts of an engine's ranks, in their order, each with as many."""

    addresses: tuple[str, ...]
    """As the hosts reach one another; the engine's own first."""
    ports: tuple[int, ...]
    """Of the RankHosts of all but the first."""
    key: str
    """Whoever has it is let in."""

    def as_environment(self) -> dict[str, str]:
        """Return the variable of the engine's process."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of_environment(cls) -> RankHosts | None:
        """Return what the variable says; None without one: all ranks are here."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        values = json.loads(text)
        return cls(tuple(values["addresses"]), tuple(values["ports"]), values["key"])

    def places(self, size: int) -> tuple[Place, ...]:
        """Return where each of `size` ranks is; raises ConfigError where hosts cannot have as many each."""
        hosts = len(self.addresses)
        if size % hosts:
            raise ConfigError(f"--tp {size} cannot be divided among {hosts} hosts")
        each = size // hosts
        return tuple(Place(self.addresses[rank // each], rank % each) for rank in range(size))

    def programs(self, size: int) -> dict[int, tuple[str, ...]]:
        """Return what the engine starts for each rank of another host."""
        each = size // len(self.addresses)
        return dict.fromkeys(range(each, size), (sys.executable, "-m", "nibble.engine.rank_hosts"))

    def address_of(self, rank: int, size: int) -> tuple[str, int]:
        """Return where the RankHost of a rank listens."""
        host = rank // (size // len(self.addresses))
        return self.addresses[host], self.ports[host - 1]


class RankHost:
    """Starts ranks of an engine on this host, as long as it lives.

    Args:
        address: of this host, as the engine's host reaches it.
        key: of those who may start something here.
        environment: variables of the ranks, beside those of this process.
    """

    def __init__(self, address: str, key: str, environment: Mapping[str, str] | None = None) -> None:
        self._listener = Listener((address, 0), authkey=key.encode())
        self._environment = dict(environment or {})
        self._processes: set[subprocess.Popen[bytes]] = set()
        threading.Thread(target=self._accept, name="rank-host", daemon=True).start()

    @property
    def port(self) -> int:
        """Return where it listens."""
        return int(self._listener.address[1])

    def close(self) -> None:
        """Start no more ranks, and end those that there are."""
        self._listener.close()
        for process in list(self._processes):
            process.kill()

    def _accept(self) -> None:
        while True:
            try:
                engine = self._listener.accept()
            except OSError:
                return  # closed
            except Exception:  # of those who lack the key, or talk another language
                continue
            threading.Thread(target=self._host, args=(engine,), daemon=True).start()

    def _host(self, engine: Connection) -> None:
        """Run a rank until it ends, or its engine is gone."""
        with suppress(OSError, EOFError), engine, tempfile.TemporaryFile() as file:
            rank, size = json.loads(engine.recv_bytes())
            file.truncate(COUNT.size * size)
            counts = mmap.mmap(file.fileno(), COUNT.size * size)
            process, connection = self._start(file.fileno(), rank, size)
            self._processes.add(process)
            try:
                threading.Thread(target=_forward, args=(engine, connection, process), daemon=True).start()
                while process.poll() is None:
                    if connection.poll(BEAT_S):
                        engine.send_bytes(MESSAGE + connection.recv_bytes())
                    at = COUNT.size * rank
                    engine.send_bytes(COUNTS + counts[at : at + COUNT.size])
            except EOFError:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILL_S)
            finally:
                process.kill()
                engine.send_bytes(END + ending(process.wait()).encode())
                self._processes.discard(process)
                connection.close()
                counts.close()

    def _start(self, counts: int, rank: int, size: int) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        paths = [str(Path(nibble.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "nibble.engine.rank", *map(str, (theirs.fileno(), counts, rank, size))],
                pass_fds=(theirs.fileno(), counts), stdin=subprocess.DEVNULL,
                env={**os.environ, **self._environment, "PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
        return process, Connection(ours.detach())


def _forward(source: Connection, target: Connection, process: subprocess.Popen[bytes]) -> None:
    """Pass on what an engine sends, and end the rank's process when there is no more."""
    with suppress(OSError, EOFError):
        while True:
            target.send_bytes(source.recv_bytes())
    process.kill()


def stand_in(engine: Connection, counts: mmap.mmap, rank: int, size: int, hosts: RankHosts) -> None:
    """Stand in for a rank of another host until it ends, or the engine does."""
    address = hosts.address_of(rank, size)
    remote: Connection | None = None
    try:
        remote = Client(address, authkey=hosts.key.encode())
        remote.send_bytes(json.dumps([rank, size]).encode())
        threading.Thread(target=_carry, args=(engine, remote), daemon=True).start()
        while True:
            kind, content = (data := remote.recv_bytes())[:1], data[1:]
            if kind == MESSAGE:
                engine.send_bytes(content)
            elif kind == COUNTS:
                counts[COUNT.size * rank : COUNT.size * (rank + 1)] = content
            else:
                raise EOFError(f"its process {content.decode()}")
    except Exception as error:  # of a host that is not there, or a rank that ended
        what = str(error) or "the connection ended"
        with suppress(OSError):
            engine.send(Failure(f"on host {address[0]}", what))
    os._exit(1)


def _carry(engine: Connection, remote: Connection) -> None:
    """Pass on what the engine sends; it ends what it no longer needs by ending its connection."""
    with suppress(OSError, EOFError):
        while True:
            remote.send_bytes(engine.recv_bytes())
    os._exit(0)


def run(arguments: Sequence[str]) -> None:
    """Stand in for a rank; see the top of this file."""
    connection, counts, rank, size = map(int, arguments)
    hosts = RankHosts.of_environment()
    assert hosts
    stand_in(Connection(connection), mmap.mmap(counts, COUNT.size * size), rank, size, hosts)


if __name__ == "__main__":
    run(sys.argv[1:])
