"""An iteration of secure aggregation on the store that servers share: bytes in, one transaction, a reply out.

Any number of desks, in any processes, may work on one store, and any of them may die. What is large (the sealed shares)
is a blob, put before the transaction that counts it; all else are records of one client each. Everything lies under the
iteration's prefix, so that the rounds' sweep takes it along.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from federated.rounds.keys import Keys
from federated.rounds.machine import valid_id
from federated.rounds.store import Store, read
from federated.secagg import messages as wire
from federated.secagg.ring import Words
from federated.secagg.roster import Context
from federated.secagg.server import Board, ClientRefused, Revealed, SumLost, Unmasking, check_advertising
from federated.secagg.session import (
    DIGEST_BYTES,
    Entry,
    Header,
    Refused,
    Reply,
    Session,
    Waiting,
)
from federated.secagg.stages import Stage


class SessionUnknown(LookupError):
    """The store holds no such iteration: it has not begun, or was swept."""


class SecAggDesk:
    """One iteration. ``registrar`` (a public key) lets servers refuse keys that are not certified; without it the
    clients alone do. A desk keeps what closed stages gathered, which never changes."""

    def __init__(
        self, store: Store, session: Session, context: Context, registrar: bytes | None = None
    ) -> None:
        self.store, self.session, self.context, self.registrar = store, session, context, registrar
        self.plan = session.plan
        self._prefix = Keys(context.job).iteration(context.iteration) + "secagg/"
        self._header = self._prefix + "header"
        self._filling = threading.Lock()
        self._board: Board | None = None
        self._loaded: set[Stage] = set()
        self._consents: dict[int, bytes] = {}
        self._unmaskings: dict[int, bytes] = {}

    # The iteration.

    def create(self, now: float, expected: int = 0) -> bool:
        """Begin; False when it has begun already. ``expected``: how many clients were admitted (0: not known yet)."""

        def step(values: Mapping[str, bytes | None]) -> tuple[Mapping[str, bytes | None], bool]:
            if values[self._header] is not None:
                return {}, False
            return {self._header: self.session.init(now, expected).to_bytes()}, True

        return self.store.transact([self._header], step)

    def header(self) -> Header:
        """Where it stands, as stored. Raises SessionUnknown."""
        return self._parsed(read(self.store, [self._header])[0])

    def expect(self, count: int, now: float) -> Header:
        """``count`` clients were admitted, and no more will be."""
        return self._change(lambda header: self.session.expect(header, count, now))

    def tick(self, now: float) -> Header:
        """Apply the window that has run out."""
        return self._change(lambda header: self.session.tick(header, now))

    def close_masked(self, clients: Iterable[str], now: float) -> Header:
        """The masked vectors of ``clients`` are in the sum, and no others: the rounds have counted them. Raises
        ValueError for one that never shared."""
        names = list(clients)
        entries = [_entry(body) for body in read(self.store, [self._entry(name) for name in names])]
        strangers = [name for name, entry in zip(names, entries, strict=True) if entry is None]
        if strangers:
            raise ValueError(f"{strangers[:10]} have no part in this iteration")
        positions = [entry.position for entry in entries if entry is not None]
        return self._change(lambda header: self.session.close_masked(header, positions, now))

    def finish(self, now: float) -> Header:
        """The sum is revealed and used."""
        return self._change(lambda header: self.session.finish(header, now))

    def fail(self, reason: str, now: float) -> Header:
        """The sum cannot be revealed, or the iteration is void."""
        return self._change(lambda header: self.session.fail(header, reason, now))

    # Clients.

    def receive(self, client: str, stage: Stage, body: bytes, now: float) -> Reply:
        """A client's message for ``stage``. Where the session counts uploads itself, its masked vector, too."""
        if not valid_id(client):
            return Refused("not_in_roster", "not the id of a client")
        if stage not in self.plan.stages or (stage is Stage.MASKED and not self.session.own_uploads):
            return Refused("bad_message", f"{stage.name} is not answered here")
        digest = hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
        # A look before any work: most of what is refused is late, early or a repeat.
        early = self._look(client, stage, digest, now)
        if not isinstance(early, tuple):
            return early
        header, entry = early
        try:
            keys = self._check(header, entry, client, stage, body)
        except ClientRefused as error:
            return Refused("bad_message", str(error))
        board = self._filled(header) if stage is Stage.UNMASK else None
        large = stage in (Stage.SHARE, Stage.MASKED)
        if large:
            assert entry is not None
            self.store.put_blob(self._blob(stage, entry.position, digest), body)

        def step(values: Mapping[str, bytes | None]) -> tuple[Mapping[str, bytes | None], Reply]:
            before = self._parsed(values[self._header])
            known = any(values[key] not in (None, client.encode()) for key in keys)
            decision = self.session.receive(
                before, _entry(values[self._entry(client)]), stage, digest, now, known
            )
            after = decision.header
            if board is not None and decision.counted and board.enough(after.answered(stage)):
                after = self.session.enough(after)
            writes = self._moved(before, after)
            if decision.counted:
                assert decision.entry is not None
                kept = _kept(client, stage, digest if large else body)
                writes[self._entry(client)] = decision.entry.to_bytes()
                writes[self._answer(stage, decision.entry.position)] = kept
                writes |= {key: client.encode() for key in keys}
            assert decision.reply is not None
            return writes, decision.reply

        return self.store.transact([self._header, self._entry(client), *keys], step)

    def download(self, client: str, stage: Stage, now: float) -> bytes | Waiting | Refused:
        """What ``client`` needs in order to answer ``stage`` (after ADVERTISE)."""
        if not valid_id(client) or stage not in self.plan.stages[1:]:
            return Refused("not_in_roster", "no such client or stage")
        header = self.tick(now)
        entry = _entry(read(self.store, [self._entry(client)])[0])
        refusal = self.session.may_read(header, entry, stage)
        if refusal is not None:
            return refusal
        assert entry is not None
        board, position = self._filled(header), entry.position
        if stage is Stage.CHOOSE or (stage is Stage.SHARE and not self.plan.choosing):
            return board.roster(position)
        if stage is Stage.SHARE:
            return board.neighbours(position)
        if stage is Stage.MASKED:
            return board.delivery(position)
        if stage is Stage.CONSISTENT or not self.plan.malicious:
            return board.survived()
        return board.signatures(position, self._consents)

    def shared(self, client: str) -> bool:
        """Whether the client's masked vector may count: it answered SHARE before that closed. False while SHARE is
        open."""
        stored, body = read(self.store, [self._header, self._entry(client)])
        header, entry = self._parsed(stored), _entry(body)
        if entry is None or header.stage <= Stage.SHARE or header.stage is Stage.FAILED:
            return False
        return wire.is_member(header.answered(Stage.SHARE), entry.position)

    def most_bytes(self, stage: Stage) -> int:
        """The longest body that a client may send for ``stage``."""
        return self.plan.masked_bytes if stage is Stage.MASKED else wire.most_bytes(stage, self.plan.most)

    # The sum.

    def survivors(self) -> tuple[str, ...]:
        """Whose vectors are in the sum, by position. Raises SessionUnknown."""
        header = self.header()
        board = self._filled(header)
        return tuple(board.entries[position].name for position in header.members(Stage.MASKED))

    def masked(self, client: str) -> bytes:
        """The masked vector that the session itself counted. Raises LookupError."""
        entry = _entry(read(self.store, [self._entry(client)])[0])
        body = None
        if entry is not None:
            body = self.store.get_blob(self._blob(Stage.MASKED, entry.position, entry.digests[Stage.MASKED]))
        if body is None:
            raise LookupError(f"no masked vector of {client}")
        return body

    def masks(self, about: bytes = b"", hold: Callable[[], None] = lambda: None) -> Unmasking:
        """The masks to add to the sum, from what the clients answered; ``about`` and ``hold`` as in ``Board.masks``.
        Raises SumLost, also when it is too early."""
        board = self._revealing()
        return board.masks(self._unmaskings, about, hold)

    def reveal(self, total: Words, threads: int = 1, about: bytes = b"") -> Revealed:
        """``total`` (the survivors' words [L] added up; not changed) without its masks; ``about`` as in
        ``Client.mask``. Raises SumLost."""
        board = self._revealing()
        return board.unmask(total, self._unmaskings, threads, about)

    # How it is kept.

    def _revealing(self) -> Board:
        header = self.header()
        if header.stage is not Stage.REVEAL:
            raise SumLost(header.reason or f"the iteration stands at {header.stage.name}")
        return self._filled(header)

    def _look(
        self, client: str, stage: Stage, digest: bytes, now: float
    ) -> Reply | tuple[Header, Entry | None]:
        stored, body = read(self.store, [self._header, self._entry(client)])
        decision = self.session.receive(self._parsed(stored), _entry(body), stage, digest, now)
        if decision.counted:
            # Not yet: it is checked against what was closed before it.
            return self.tick(now), _entry(body)
        assert decision.reply is not None
        return decision.reply

    def _check(
        self, header: Header, entry: Entry | None, client: str, stage: Stage, body: bytes
    ) -> list[str]:
        """The keys of the store that say who advertised the public keys in ``body``. Raises ClientRefused."""
        if stage is Stage.ADVERTISE:
            read_ = check_advertising(self.plan, self.context, self.registrar, client, body)
            return [f"{self._prefix}key/{public.hex()}" for public in (read_.sealing, read_.masking)]
        assert entry is not None
        if stage is Stage.MASKED:
            if len(body) != self.plan.masked_bytes:
                raise ClientRefused("malformed", f"{len(body)} bytes where {self.plan.masked_bytes} are due")
        else:
            self._filled(header).check(stage, entry.position, body)
        return []

    def _filled(self, header: Header) -> Board:
        """The board with every stage before the header's."""
        if header.stage is Stage.ADVERTISE:
            raise SessionUnknown("the roster is not closed yet")
        with self._filling:
            if self._board is None:
                bodies = self._answers(Stage.ADVERTISE, range(header.clients))
                entries = tuple(_roster_entry(*pair) for pair in bodies.items())
                self._board = Board(self.plan, self.context, entries)
            for stage in self.plan.stages[1:]:
                if header.stage > stage and stage not in self._loaded:
                    self._load(self._board, header, stage)
                    self._loaded.add(stage)
            return self._board

    def _load(self, board: Board, header: Header, stage: Stage) -> None:
        members = header.members(stage)
        if stage is Stage.MASKED:
            board.survivors = header.masked
            return
        answers = {position: _split(body)[1] for position, body in self._answers(stage, members).items()}
        if stage is Stage.CHOOSE:
            board.choose(answers)
        elif stage is Stage.SHARE:
            board.shared = header.shared
            board.sharings = {
                position: self._sealed(position, digest) for position, digest in answers.items()
            }
        elif stage is Stage.CONSISTENT:
            self._consents = answers
        else:
            self._unmaskings = answers

    def _sealed(self, position: int, digest: bytes) -> bytes:
        body = self.store.get_blob(self._blob(Stage.SHARE, position, digest))
        if body is None:
            raise SessionUnknown(f"the shares of position {position} are gone: the iteration was swept")
        return body

    def _answers(self, stage: Stage, positions: Sequence[int]) -> dict[int, bytes]:
        bodies = read(self.store, [self._answer(stage, position) for position in positions])
        if any(body is None for body in bodies):
            raise SessionUnknown(f"answers to {stage.name} are gone: the iteration was swept")
        return {position: body for position, body in zip(positions, bodies, strict=True) if body is not None}

    def _change(self, move: Callable[[Header], Header]) -> Header:
        def step(values: Mapping[str, bytes | None]) -> tuple[Mapping[str, bytes | None], Header]:
            before = self._parsed(values[self._header])
            after = move(before)
            return self._moved(before, after), after

        return self.store.transact([self._header], step)

    def _moved(self, before: Header, after: Header) -> dict[str, bytes | None]:
        # A clock that moved on alone is not worth a write.
        return {} if after._replace(clock=before.clock) == before else {self._header: after.to_bytes()}

    def _parsed(self, body: bytes | None) -> Header:
        if body is None:
            raise SessionUnknown(
                f"no secure aggregation in iteration {self.context.iteration} of {self.context.job}"
            )
        return Header.from_bytes(body)

    def _entry(self, client: str) -> str:
        return f"{self._prefix}entry/{client}"

    def _answer(self, stage: Stage, position: int) -> str:
        return f"{self._prefix}{stage.name.lower()}/{position:05d}"

    def _blob(self, stage: Stage, position: int, digest: bytes) -> str:
        return f"{self._prefix}{stage.name.lower()}/{position:05d}/{digest.hex()}"


def _entry(body: bytes | None) -> Entry | None:
    return None if body is None else Entry.from_bytes(body)


def _kept(client: str, stage: Stage, body: bytes) -> bytes:
    """An answer as it is kept: a roster's line needs the client's id."""
    name = client.encode() if stage is Stage.ADVERTISE else b""
    return len(name).to_bytes(2, "little") + name + body


def _split(kept: bytes) -> tuple[str, bytes]:
    letters = int.from_bytes(kept[:2], "little")
    return kept[2 : 2 + letters].decode(), kept[2 + letters :]


def _roster_entry(position: int, kept: bytes) -> wire.RosterEntry:
    name, body = _split(kept)
    return wire.RosterEntry(position, name, wire.read_as(wire.Advertisement, body))
