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
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from nibble.engine.ranks import BEAT_S, COUNT, KILL_S, PROGRAM, SILENT_S, Failure, Place, live, spawn
from nibble.errors import ConfigError
from nibble.processes import ending

VARIABLE = "NIBBLE_RANK_HOSTS"
MESSAGE, COUNTS, END = b"m", b"c", b"e"
"""What a RankHost sends: a message of the rank, what it has noted, how its process ended."""
ADMIT_S, SAID_S = 10.0, 0.2
"""Given to a client to show that it has the key; to an engine to read why a rank ended."""


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
        return tuple(Place(self.addresses[rank // each], rank % each, rank // each) for rank in range(size))

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
    """

    def __init__(self, address: str, key: str) -> None:
        self._listener, self._key = socket.create_server((address, 0), backlog=128), key.encode()
        self._port, self._is_closed = int(self._listener.getsockname()[1]), False
        self._processes: set[subprocess.Popen[bytes]] = set()
        threading.Thread(target=self._accept, name="rank-host", daemon=True).start()

    @property
    def port(self) -> int:
        """Return where it listens."""
        return self._port

    def close(self) -> None:
        """Start no more ranks, and end those that there are."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else a thread that accepts keeps it open
        self._listener.close()
        for process in list(self._processes):
            process.kill()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                time.sleep(BEAT_S)  # too many files are open, or it is closed
                continue
            # Whoever it is may keep this thread waiting, and no other.
            threading.Thread(target=self._admit, args=(client,), daemon=True).start()

    def _admit(self, client: socket.socket) -> None:
        """Run a rank for whoever has the key, until it ends or they are gone."""
        _set_up(client)
        client.settimeout(None)
        _limit(client, ADMIT_S)
        with suppress(OSError, EOFError, AuthenticationError), Connection(client.detach()) as engine:
            deliver_challenge(engine, self._key)
            answer_challenge(engine, self._key)
            rank, size = json.loads(engine.recv_bytes())
            with socket.socket(fileno=os.dup(engine.fileno())) as same:
                _limit(same, 0)
            try:
                end = self._run(engine, rank, size)
            except OSError as error:
                end = f"cannot be run there ({type(error).__name__}: {error})"
            engine.send_bytes(END + end.encode())

    def _run(self, engine: Connection, rank: int, size: int) -> str:
        """Run a rank, and return how it ended."""
        with tempfile.TemporaryFile() as file:
            file.truncate(COUNT.size * size)
            counts = mmap.mmap(file.fileno(), COUNT.size * size)
            process, connection = spawn(PROGRAM, file.fileno(), rank, size)
            self._processes.add(process)
            try:
                threading.Thread(target=_forward, args=(engine, connection, process), daemon=True).start()
                # What it says comes first: it may be why it ends.
                while connection.poll(BEAT_S) or process.poll() is None:
                    if connection.poll(0):
                        engine.send_bytes(MESSAGE + connection.recv_bytes())
                    at = COUNT.size * rank
                    engine.send_bytes(COUNTS + counts[at : at + COUNT.size])
            except (EOFError, ConnectionError):
                # The system ends a connection before it says how a process ended.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILL_S)
            finally:
                process.kill()
                self._processes.discard(process)
            return ending(process.wait())


def _set_up(client: socket.socket) -> None:
    """Let small messages go at once, and notice a host that is gone without a word."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S))


def _limit(client: socket.socket, seconds: float) -> None:
    """Limit how long a call may wait for the other side; 0 for no limit."""
    limit = struct.pack("ll", int(seconds), 0)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _forward(source: Connection, target: Connection, process: subprocess.Popen[bytes]) -> None:
    """Pass on what an engine sends, and end the rank's process when there is no more."""
    with suppress(OSError, EOFError):
        while True:
            target.send_bytes(source.recv_bytes())
    process.kill()


# The process that stands in


def stand_in(engine: Connection, counts: mmap.mmap, rank: int, size: int, hosts: RankHosts) -> None:
    """Stand in for a rank of another host until it ends, or the engine does."""
    # First of all, as what follows may wait for a host that is not there.
    watch = os.getppid(), engine.fileno(), lambda _: None
    threading.Thread(target=live, args=watch, daemon=True).start()
    address, port = hosts.address_of(rank, size)
    try:
        client = socket.create_connection((address, port), ADMIT_S)
        client.settimeout(None)
        _set_up(client)
        _limit(client, SILENT_S)  # it is heard of every fifth of a second
        remote, key = Connection(client.detach()), hosts.key.encode()
        answer_challenge(remote, key)
        deliver_challenge(remote, key)
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
    except BlockingIOError:
        what = f"nothing was heard of it for {SILENT_S:.0f} s"
    except Exception as error:  # of a host that is not there, or a rank that ended
        what = str(error) or "the connection ended"
    with suppress(OSError):
        engine.send(Failure(f"on host {address}", what))
    time.sleep(SAID_S)
    os._exit(1)


def _carry(engine: Connection, remote: Connection) -> None:
    """Pass on what the engine sends. The thread that hears of the rank says why that ends."""
    with suppress(OSError, EOFError):
        while True:
            remote.send_bytes(engine.recv_bytes())


def run(arguments: Sequence[str]) -> None:
    """Stand in for a rank; see the top of this file."""
    connection, counts, rank, size = map(int, arguments)
    hosts = RankHosts.of_environment()
    assert hosts
    stand_in(Connection(connection), mmap.mmap(counts, COUNT.size * size), rank, size, hosts)


if __name__ == "__main__":
    run(sys.argv[1:])
