"""The device's part of a federated job: ask to take part, download, train, upload, and again.

``Device`` is the loop without I/O: ``next`` says what to do, ``received``, ``lost`` and ``train`` tell it what came of
it. ``python -m federated.client`` runs it over HTTP; it needs Python and NumPy, nothing else.

- What a device sends is trained once: a repeat after a lost reply, a crash or a change of server sends the same bytes,
  and the server counts them once.
- A lost network costs a wait that doubles up to a minute, with jitter, and the next server is tried.
- A budget of seconds and bytes ends the loop between two steps; a step that would go beyond it is not begun.
- Under a mechanism whose reports are private by themselves the device counts them, durably, and takes no further part
  once its own privacy budget affords none; it believes no server on that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum

import numpy as np

from federated.client_folder import DeviceFolder, Memory, Pending
from federated.client_held import HeldModel
from federated.client_http import Answer, Call
from federated.client_privacy import privacy_spent
from federated.client_requests import Requests, problem_code
from federated.client_secure import Next, RoundLost, SecureRound, ServerDistrusted, begin_round, mask_update
from federated.client_steps import Budget, Done, Spent, Terms, Train, Wait
from federated.client_trainer import Trainer, client_number
from federated.compression import BaseUnknown, BodyRefused
from federated.device import (
    COMPRESSION,
    ControlVariates,
    Instructions,
    device_generator,
)
from federated.frames import FrameRefused
from federated.payload import encode_update, shared_seed
from federated.privacy.budget import terms_of
from federated.privacy.protection import report_update
from federated.privacy.randomness import SYSTEM, Randomness
from federated.privacy.section import DISTRIBUTED, LOCAL
from federated.rounds.messages import (
    Accepted,
    Admitted,
    Finished,
    NotYet,
    Refused,
    Reply,
)
from federated.secagg.quantise import Perturb, ValuesRefused
from federated.secagg.updates import start_digest
from federated.selection import DeviceFacts
from federated.weights import Array
from federated.wire import decode_model, decode_reply

LONGEST_BACK_OFF_S = 60.0
_FIRST_BACK_OFF_S = 0.25
_HEADS_BYTES = 768
_ANEW_S = 1.0
_WITHOUT_IT = frozenset({404, 409, 410, 422})
"""Statuses of a stage that this device has missed: it takes part again from the next iteration on."""


class _Step(Enum):
    START = "start"
    STAGE = "stage of secure aggregation"
    MODEL = "model"
    TRAIN = "train"
    ASK_PARTS = "ask parts"
    PART = "part"
    UPLOAD = "upload"


class Device:
    """One client's loop. Times are seconds of any clock that only goes forward; ``draw`` gives numbers in [0, 1)."""

    def __init__(
        self,
        client: str,
        terms: Terms,
        trainer: Trainer,
        folder: DeviceFolder,
        now: float,
        draw: Callable[[], float],
        *,
        facts: DeviceFacts | None = None,
        budget: Budget | None = None,
        randomness: Randomness = SYSTEM,
    ) -> None:
        self._client = client
        self._number = client_number(client)
        self._terms = terms
        self._trainer = trainer
        self._folder = folder
        self._draw = draw
        self._facts = facts or DeviceFacts()
        if terms.protection.section.mechanism != "none":
            self._facts = replace(self._facts, examples=0)  # how many it has is data
        self._budget = budget or Budget()
        self._randomness = randomness
        self._began = now
        self._requests = Requests(terms.job, client)
        self._step = _Step.START
        self._wait: Wait | None = None
        self._done: Done | None = None
        self._failures = 0
        self._admitted: Admitted | None = None
        self._start: Array | None = None
        self._instructions = Instructions()
        self._server: dict[str, Array] = {}
        self._offset = 0
        self._whole = True  # whether an upload's body travels with it
        self._round_bytes = 0
        self._round_began = 0
        self._secure: SecureRound | None = None
        self._missed = 0  # the last iteration that goes on without this device
        self._held = HeldModel(folder, terms.grid, trainer.layout.size)
        self._pending = folder.pending()
        if self._pending is not None:
            self._begin_upload()
        self.spent = Spent()

    def next(self, now: float) -> Call | Wait | Train | Done:
        """What to do now."""
        if self._done is None and now - self._began >= self._budget.seconds:
            self._done = Done("seconds")
        if self._done is not None:
            return self._done
        if self._wait is not None:
            if now < self._wait.until:
                return self._wait
            self._wait = None
        if self._step in (_Step.START, _Step.MODEL, _Step.TRAIN):
            self._done = privacy_spent(self._terms.job, self._terms.protection, self._folder)
            if self._done is not None:
                return self._done
        if self._step is _Step.TRAIN:
            return Train()
        call = self._call()
        if not self._affords(call):
            self._done = Done("bytes")
            return self._done
        return call

    def lost(self, why: str, now: float) -> None:
        """The last call came to nothing."""
        self.spent.lost += 1
        self._failures += 1
        back_off_s = min(_FIRST_BACK_OFF_S * 2.0 ** (self._failures - 1), LONGEST_BACK_OFF_S)
        self._wait = Wait(now + back_off_s * (0.5 + self._draw()), why)
        if self._step is _Step.PART:
            self._step = _Step.ASK_PARTS  # how much of it arrived is for the server to say

    def received(self, answer: Answer, now: float) -> None:
        """The last call's answer."""
        self.spent.sent += answer.sent
        self.spent.received += answer.received
        if answer.status in (408, 429) or answer.status >= 500:
            self.lost(f"status {answer.status}", now)
            return
        self._failures = 0
        if answer.status >= 400:
            self._problem(answer, now)
            return
        try:
            if self._step in (_Step.ASK_PARTS, _Step.PART):
                self._parts_there(answer)
            elif self._step is _Step.MODEL:
                self._take_model(answer.body, now)
            elif self._step is _Step.STAGE:
                assert self._secure is not None
                self._staged(self._secure.received(answer), now)
            else:
                self._reply(decode_reply(answer.body, now), now)
        except RoundLost as error:
            self._miss(now, str(error))
        except ServerDistrusted as error:
            # Whatever it sends next, it is not to learn more.
            self._drop()
            self._done = Done("refused", str(error))
        except (FrameRefused, ValueError) as error:
            # The peer speaks another language, or the bytes were damaged: neither ends the device's life.
            self.lost(f"an answer that cannot be read: {error}", now)

    def train(self, now: float) -> None:
        """Train on the model that was downloaded, and keep the update until it is accepted. What came to NaN or
        infinity is thrown away: nobody would take it, and error feedback would keep it for ever. Under a mechanism of
        privacy a report of zeros is sent instead, since who stays away tells that it diverged."""
        admitted, start = self._admitted, self._start
        assert admitted is not None
        assert start is not None
        memory = self._folder.memory()
        control = None
        if "control" in self._instructions.vectors:
            own = np.zeros_like(start) if memory.control is None else memory.control
            control = ControlVariates(self._server["control"], own)
        update = self._trainer.train(start, self._instructions, admitted.iteration, control)
        layout, protection = self._trainer.layout, self._terms.protection
        if not all(np.isfinite(vector).all() for vector in update.vectors.values()):
            if protection.section.mechanism == "none":
                self._stand_aside(now, "training diverged")
                return
            self.spent.diverged += 1
        update = report_update(
            protection, update, layout, self._randomness, start, self._instructions.threshold
        )
        generator = device_generator(self._terms.seed, self._number, admitted.iteration, COMPRESSION)
        shared = shared_seed(self._terms.seed, admitted.iteration)
        sent = encode_update(
            self._terms.scheme, update.vectors, generator, memory.residuals, shared, update.bit
        )
        if self._secure is not None:
            assert self._terms.secure is not None
            try:
                about = start_digest(start, self._instructions, self._server)
                update, sent = mask_update(
                    self._terms.secure, self._secure, update, sent, about, self._noise()
                )
            except ValuesRefused as error:
                self._stand_aside(now, f"what was learned cannot be masked: {error}")
                return
        # c_i moves by what the server will read, so that both sides' controls stay the same.
        after = Memory(
            admitted.iteration,
            sent.residuals,
            None if control is None else control.client + sent.decoded["control"],
        )
        section = protection.section
        if section.mechanism in LOCAL and not self._folder.count_report(
            terms_of(section), protection.most_reports
        ):
            self._step = _Step.START  # another process has spent what was left
            return
        self._pending = Pending(
            admitted.iteration, admitted.ticket, update.examples, update.steps, update.loss, sent.body, after
        )
        self._folder.keep_pending(self._pending)
        self._begin_upload()

    def _noise(self) -> Perturb | None:
        """This device's share of the noise that protects the sum, where the mechanism asks for one."""
        protection = self._terms.protection
        if protection.section.mechanism not in DISTRIBUTED:
            return None
        return lambda whole: protection.perturb(whole, self._trainer.layout, self._randomness)

    def _stand_aside(self, now: float, why: str) -> None:
        self.spent.diverged += 1
        self._step = _Step.START
        self._wait = Wait(now + LONGEST_BACK_OFF_S * (0.5 + self._draw() / 2.0), why)

    # What to send.

    def _call(self) -> Call:
        pending, requests = self._pending, self._requests
        if self._step is _Step.START:
            self._round_began = self.spent.sent + self.spent.received
            return requests.start(self._facts, self._held.version)
        if self._step is _Step.STAGE:
            assert self._secure is not None
            return self._secure.call()
        if self._step is _Step.MODEL:
            assert self._admitted is not None
            return requests.model(self._admitted.version, self._held.version)
        assert pending is not None
        if self._step is _Step.UPLOAD:
            return requests.upload(pending, self._whole)
        if self._step is _Step.ASK_PARTS:
            return requests.parts_there(pending)
        return requests.part(pending, self._offset, self._terms.part_bytes)

    def _affords(self, call: Call) -> bool:
        """Whether the step fits into what is left: its body, the longest reply there may be, and both heads. A round is
        begun only if one like the last fits."""
        needed = len(call.body) + _HEADS_BYTES
        if self._step is _Step.START:
            needed = max(needed, self._round_bytes)
        elif self._step is _Step.MODEL:
            needed += self._held.most_bytes
        elif self._secure is not None and self._step is _Step.STAGE:
            needed += self._secure.most_reply
        return self.spent.sent + self.spent.received + needed <= self._budget.bytes

    # What came back.

    def _reply(self, reply: Reply, now: float) -> None:
        if isinstance(reply, Admitted):
            self._admitted = reply
            if self._pending is not None and self._pending.iteration == reply.iteration:
                self._begin_upload()  # trained already, before a crash or at another server
            elif self._terms.secure is not None:
                self._begin_stages(reply, now)
            else:
                self._step = _Step.MODEL
        elif isinstance(reply, Accepted):
            self._accepted(now, reply)
        elif isinstance(reply, NotYet):
            self._wait = Wait(reply.come_back_at, reply.reason)
            self._whole = False  # if it was an upload, its body is there now
        elif isinstance(reply, Refused):
            self._refused(reply, now)
        elif isinstance(reply, Finished):
            self._done = Done("finished")

    def _accepted(self, now: float, reply: Accepted) -> None:
        pending = self._pending
        assert pending is not None
        self._folder.accept(pending)
        self._pending = None
        self.spent.accepted += 1
        self.spent.upload_bytes += len(pending.body)
        if self._terms.protection.section.mechanism == "none":  # else it is kept to itself
            self.spent.losses.append(pending.loss)
        self._round_bytes = self.spent.sent + self.spent.received - self._round_began
        self._step = _Step.START
        self._wait = Wait(reply.come_back_at, "accepted")
        if self._secure is not None:
            self._staged(self._secure.uploaded(), now)  # the others may need its shares
        else:
            self._round_over()

    def _round_over(self) -> None:
        self._step = _Step.START
        if self._budget.rounds is not None and self.spent.accepted >= self._budget.rounds:
            self._done = Done("rounds")

    def _refused(self, reply: Refused, now: float) -> None:
        self.spent.refused += 1
        self._drop()
        if reply.come_back_at is None:
            self._done = Done("finished" if reply.code in ("late", "expired") else "refused", reply.reason)
        else:
            self._wait = Wait(reply.come_back_at, reply.code)

    def _problem(self, answer: Answer, now: float) -> None:
        code = problem_code(answer.body)
        if code == "stage_early":
            self._wait = Wait(now + self._pause_s(), code)
        elif code == "stage_over" or (self._step is _Step.STAGE and answer.status in _WITHOUT_IT):
            self._drop()
            self._miss(now, code)
        elif answer.status == 410 or code == "not_here":
            self._step = _Step.START
            self._wait = Wait(now + _ANEW_S * (0.5 + self._draw()), code)
        elif code in ("body_missing", "offset_mismatch"):
            self._whole = True
            self._begin_upload()
        elif answer.status in (413, 422) and self._pending is not None:
            # This update will never be taken; what the memory held before it stays.
            self.spent.refused += 1
            self._drop()
            self._wait = Wait(now + LONGEST_BACK_OFF_S * self._draw(), code)
        else:
            self._done = Done("refused", f"status {answer.status} {code}".strip())

    def _parts_there(self, answer: Answer) -> None:
        assert self._pending is not None
        offset = int(answer.headers.get("upload-offset", ""))
        if not 0 <= offset <= len(self._pending.body):
            raise ValueError(f"{offset} of {len(self._pending.body)} bytes are said to be there")
        self._offset = offset
        self._step = _Step.UPLOAD if offset == len(self._pending.body) else _Step.PART
        self._whole = False

    def _take_model(self, body: bytes, now: float) -> None:
        found = decode_model(body, self._trainer.layout.size)
        self.spent.download_bytes += len(body)
        try:
            vector = self._held.take(found)
        except BaseUnknown:
            return  # asks again, for the whole model
        except BodyRefused as error:
            raise FrameRefused(str(error)) from error
        self._start, self._instructions, self._server = vector, found.instructions, dict(found.vectors)
        self._step = _Step.TRAIN

    # What is kept.

    def _begin_upload(self) -> None:
        assert self._pending is not None
        self._offset = 0
        self._whole = len(self._pending.body) <= self._terms.part_bytes
        self._step = _Step.UPLOAD if self._whole else _Step.ASK_PARTS

    def _drop(self) -> None:
        self._folder.drop_pending()
        self._pending = None
        self._step = _Step.START
        self._forget_masks()

    # Secure aggregation.

    def _begin_stages(self, admitted: Admitted, now: float) -> None:
        assert self._terms.secure is not None
        if admitted.iteration == self._missed:
            self._step = _Step.START
            self._wait = Wait(now + self._pause_s(), "the iteration goes on without this device")
            return
        if self._secure is None or self._secure.iteration != admitted.iteration:
            self._forget_masks()
            self._secure = begin_round(
                self._terms.secure,
                self._terms.job,
                self._client,
                self._requests.path,
                admitted.iteration,
                admitted.ticket,
            )
        self._step = _Step.MODEL if self._secure.masking else _Step.STAGE

    def _staged(self, following: Next, now: float) -> None:
        """A stage has been answered, or has to be waited for."""
        assert self._terms.secure is not None
        assert self._secure is not None
        self._step = _Step.STAGE
        if following is Next.MASK:
            self._step = _Step.MODEL
        elif following is Next.WAIT:
            self._wait = Wait(now + self._pause_s(), f"the others: {self._secure.stage.name.lower()}")
        elif following is Next.OVER:
            self._missed = self._secure.iteration  # it has done its part
            self._forget_masks()
            self._wait = Wait(now + self._pause_s(), "accepted")
            self._round_over()
        else:
            self._wait = None

    def _miss(self, now: float, why: str) -> None:
        """The iteration goes on, or ends, without this device."""
        if self._admitted is not None:
            self._missed = self._admitted.iteration
        self.spent.missed += 1
        self._forget_masks()
        self._wait = Wait(now + self._pause_s(), why)
        self._round_over()

    def _pause_s(self) -> float:
        pause_s = _ANEW_S if self._terms.secure is None else self._terms.secure.pause_s
        return pause_s * (0.5 + self._draw())

    def _forget_masks(self) -> None:
        if self._secure is not None:
            self._secure.close()
            self._secure = None


def summary(device: Device, done: Done) -> Mapping[str, object]:
    """What a run came to, as plain values."""
    spent = device.spent
    return {
        "ended": done.why, "detail": done.detail, "accepted": spent.accepted, "refused": spent.refused,
        "lost": spent.lost, "diverged": spent.diverged, "missed": spent.missed,
        "sent_bytes": spent.sent, "received_bytes": spent.received,
        "upload_bytes": spent.upload_bytes, "download_bytes": spent.download_bytes,
        "loss": spent.losses[-1] if spent.losses else None,
    }  # fmt: skip
