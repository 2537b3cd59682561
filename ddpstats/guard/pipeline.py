"""Take in each collective while a guard is active: describe it, record it, and have it compared."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from itertools import product
from typing import Any

import torch.distributed as dist

from ddpstats._base.text import first_line
from ddpstats._observe.collectives import Subscriber
from ddpstats._observe.frames import calling_frame, main_stack, site_of
from ddpstats._observe.groups import GroupView
from ddpstats._observe.operators import Collective
from ddpstats.guard.compare import Comparing
from ddpstats.guard.diagnosis import DOUBT, LEFT, NOTHING, GuardFinding, RankStatus
from ddpstats.guard.event import BY_TORCH, MESSAGES, Event, Ring, encode, event_of, label_word
from ddpstats.guard.group import Group, GuardState, IssuedCall, Session, Settings, identity
from ddpstats.guard.labels import current_label
from ddpstats.guard.labels.read import Chain, Inferred, infer
from ddpstats.guard.printing import Tally
from ddpstats.guard.recording import Identity, Recording
from ddpstats.guard.signature import NO_PIECES, parts_of, pieces_of, signature_of

RING_EVENTS = 10_000
_GATHERING = "all_gather"  # has a label where the program adds up what it gathers
_REPORTED_EVENTS = 2000  # of one group
_REPORTED_MESSAGES = 256
_STACK_FRAMES = 6  # of the main thread, for a rank that is in no collective
_KEPT_WORKS = 1024  # messages that are never waited for would keep their tensors
_KEPT_EVENTS = 4096
_MOST_GIVEN = 8  # labels that a line is given and other ranks lack: it may be given another one at each step
_EXPIRED_MS = 1  # of a collective whose own timeout has passed while the guard waited: torch raises its own error

log = logging.getLogger("ddpstats")


class Watching(Subscriber):
    """The collectives of this process, from when a guard is entered until it is left. Subscriber of `collectives`.

    ``comparing`` is None where there is nothing to compare, or no rank to compare with.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._mode = settings, settings.mode
        has_timeout = settings.has_timeout and settings.compares
        self._timeout_ms = int(settings.timeout_sec * 1000) if has_timeout else None
        self._lock = threading.RLock()
        self.ring = Ring(RING_EVENTS)
        self.recording = Recording(settings.record_dir, identity)
        self.state = GuardState(recording=self.recording)
        self.session: Session | None = None
        self.comparing: Comparing | None = None
        self.how_left: str | None = None
        self._is_inherited = False  # by a process that was forked from the guarded one
        self._works: dict[int, tuple[Any, IssuedCall]] = {}  # that run, and that the program will wait for
        self._unfinished: list[tuple[Any, IssuedCall]] = []  # waited for, and did not end
        self._silenced: set[Chain | tuple[str | None, str]] = set()  # ways to each rank's own labels; (label, line)
        self._given_here: Counter[str] = Counter()  # by line, the labels given there that other ranks lacked
        self._known: dict[tuple[Any, ...], Event] = {}  # one for all calls that are equal

    def begin(self) -> Session:
        """Connect: on entering, at the first collective, or at the first one of another process group."""
        if self.session is not None:
            self._end_session(self.session)
            self._known.clear()
            self.ring = Ring(RING_EVENTS)  # numbers begin again
            self.how_left = None
            self.state.past += self.session.tally()
        session = self.session = Session(self._settings, self)
        self.recording.begin(Identity(session.run, session.rank, dist.get_world_size()))
        compares = session.agreement is not None
        self.comparing = Comparing(session, self.state, self._settings) if compares else None
        return session

    # -- subscriber of `collectives` -----------------------------------------------------------------------------------

    def before(self, call: Collective) -> None:
        """Describe, record, and where possible compare, before anything moves."""
        if self._is_inherited:
            return
        state = self.state
        if state.verdict is not None:
            state.raise_verdict()
        comparing = self.comparing
        if comparing is not None and comparing.agreement.failure.verdict is not None:
            comparing.verdicts.catch_up()
        is_message = call.operator.is_message
        with self._lock:
            group = None if self.session is None else self.session.find(call.view)
            if group is None:
                group = self._add(call.view)
            event = self._describe(call, group)
            if not is_message:
                group.seq += 1
            seq = group.seq
            entry = event, group.messages.next(event) if is_message else seq, time.time()
            self.ring.append(entry)
            issued = IssuedCall(group, entry, call.is_on_host, call.limit, time.monotonic())
            if not is_message:
                group.newest = issued
            state.collectives += 1
            if self.recording.has_begun:
                self.recording.write_event(event_of(entry))
        call.subscriber_state = issued
        if self._timeout_ms is not None and not call.blocking and not state.silent and call.is_on_host:
            call.timeout_ms = None if group.limit(call.limit).is_own else self._timeout_ms
        comparing = self.comparing  # a new one, at the first collective
        if state.silent or group.exchange is None or comparing is None:
            return
        if is_message:
            comparing.verdicts.begin_message(group, event_of(entry))
            return
        if group.is_given_up:
            return
        call.on_failure = comparing.verdicts.note_failure
        # The other ranks of this host see what is about to be issued, even if gloo aborts this process.
        is_announced = self._mode == "step" or not call.blocking
        if is_announced and group.exchange.announce(seq, event.digest, event.encoded or encode(event)):
            comparing.stop_before(group, seq)
        if self._mode == "strict":
            comparing.post(group, event, seq)
            if call.blocking and comparing.settle(group, seq, issued.limit):
                call.timeout_ms = _EXPIRED_MS
        else:
            comparing.take_in(group, event, self._settings.check_every)

    def after(self, call: Collective, work: Any) -> bool:
        """Wait for a blocking collective, so that a rank that never comes is named."""
        issued = call.subscriber_state  # None of a call that began before this guard
        # The program does not wait for a device here, either.
        if issued is None or self.comparing is None or self.state.silent or work is None or not call.is_on_host:
            return False
        if call.blocking:
            return self.comparing.verdicts.wait_for(work, issued)
        # What is done and was not waited for may never be (DDP, functional collectives wait in C++), and keeps its
        # tensors alive. It is settled with the next one of its group. Of a message gloo says only to the rank that
        # waits whether it is done.
        for key, (known, earlier) in list(self._works.items()):
            if not earlier.entry[0].is_message and known.is_completed():
                self._works.pop(key, None)
        if len(self._works) >= _KEPT_WORKS:
            self._works.pop(next(iter(list(self._works))), None)
        if issued.group.exchange is not None:  # with no other rank in the group there is nothing to settle
            self._works[id(work)] = work, issued
        return False

    def before_wait(self, work: Any, limited: bool) -> bool:
        """Settle an asynchronous collective, or a message, for which the program is about to wait.

        Where the program gives that wait a timeout, that holds, and what is not there yet is settled later.
        """
        comparing = self.comparing
        if comparing is None or self.state.silent:
            return False
        known = None if limited else self._works.pop(id(work), None)
        if known is None:
            return False
        issued = known[1]
        group, entry = issued.group, issued.entry
        if entry[0].is_message:
            comparing.verdicts.wait_for_message(work, group, event_of(entry))
            return True
        is_over = group.is_given_up or (self._mode == "strict" and comparing.settle(group, entry[1], issued.limit))
        if not is_over and not self.state.silent:
            comparing.verdicts.wait_for(work, issued)
        return False

    def after_wait(self, work: Any, error: RuntimeError | None) -> None:
        """Let go of a work that is done. Where the wait failed, with its own timeout, the program may wait again."""
        if error is None:
            self._works.pop(id(work), None)
        elif (known := self._works.get(id(work))) is not None:
            unfinished = [pair for pair in self._unfinished if pair[0] is not work and not pair[0].is_completed()]
            self._unfinished = [*unfinished, known]

    # -- describing ---------------------------------------------------------------------------------------------------

    def _describe(self, call: Collective, group: Group) -> Event:
        """Return the event of the call without number and time: one object for all calls that are equal.

        Its site keeps the code object, and so the id that the event is known by, alive.
        """
        parts, operator = parts_of(call), call.operator
        pieces = pieces_of(call) if operator.compared == "pieces" else NO_PIECES
        frame, by_torch, is_api, is_functional = calling_frame(4)  # from what called the function that shows the call
        label: str | Inferred | None = current_label()
        if label is None and by_torch:
            label = BY_TORCH if operator.combines else None
        elif label is None and self._settings.infer_labels and is_api and frame is not None and call.inputs:
            label = infer(frame, is_functional) if operator.combines or operator.op == _GATHERING else None
        call_site = (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)
        key = group, parts, pieces, call.peer, call.tag, label, call_site
        event = self._known.get(key)
        if event is None:
            if len(self._known) >= _KEPT_EVENTS:
                self._known.clear()
            signature, digest = signature_of(parts)
            source = label if isinstance(label, Inferred) else None
            text = label.path if isinstance(label, Inferred) else label
            name = f"{group.name}{MESSAGES}" if operator.is_message else group.name
            peer = None if call.peer is None else call.view.ranks[call.peer]
            word, site = label_word(text), site_of(frame)
            event = Event(name, 0, signature, text, word, site, digest, *pieces, peer, call.tag, evidence_source=source)
            self._known[key] = event
            self._silence(event)
        return event

    def _silence(self, event: Event) -> None:
        """Compare the event's label no more where that was found to differ for good reasons."""
        line, way = str(event.site), getattr(event.evidence_source, "chain", None)
        is_own = way is None and self._given_here[line] >= _MOST_GIVEN
        if is_own or way in self._silenced or (event.label, line) in self._silenced:
            event.word = 0

    def _add(self, view: GroupView) -> Group:
        session = self.session
        if session is None or session.is_over():
            session = self.begin()
        group = session.add(view)
        self.recording.write({"new_group": group.name, "words": group.words, "ranks": list(view.ranks)})
        return group

    def leave(self, error: BaseException | None, compares: bool = False) -> None:
        """Report that this rank leaves, and how; never waits. Idempotent.

        ``compares``: the last comparison follows.
        """
        if self.how_left is not None:
            return
        self.how_left = LEFT if error is None else f"{LEFT} by {type(error).__name__}: {first_line(error)[:300]}"
        self.recording.begin_early()
        self.recording.write({"end": "left" if error is None else type(error).__name__, "time": time.time()})
        if compares and self.comparing is not None:
            for work, issued in self._unfinished:
                if not work.is_completed():
                    self.comparing.verdicts.give_up(issued.group)
            self.comparing.post_ends()  # first: a rank that sees that this one has left looks for them
        if self.session is not None:
            self.session.leave(self.how_left)

    def tally(self) -> Tally:
        """Return what was compared so far, over all sessions."""
        return self.state.past if self.session is None else self.state.past + self.session.tally()

    def is_over(self) -> bool:
        """Return whether the program has destroyed the process group since."""
        return self.session is not None and self.session.is_over()

    def close(self) -> None:
        """Local and idempotent."""
        if self.session is not None:
            self._end_session(self.session)
        self.recording.close()

    def _end_session(self, session: Session) -> None:
        session.close()
        self._works.clear()
        self._unfinished.clear()

    def disown(self) -> None:
        """Let go of everything: this process was forked from the guarded one, which goes on."""
        self._is_inherited, self.comparing = True, None
        self.recording.close(is_forked=True)

    # -- statuses and verdicts -----------------------------------------------------------------------------------------

    def position(self) -> str:
        last = self.ring.last()
        group = None if last is None or self.session is None else self.session.named.get(last.group)
        return "" if last is None else last.in_full("" if group is None else group.words)

    def report_status(self, name: str) -> RankStatus:
        """Return what this rank knows of itself about one group. Called by any thread."""
        session, name = self.session, name.removesuffix(MESSAGES)
        group = None if session is None else session.named.get(name)
        agreed = 0 if group is None else group.agreed  # what is in question comes after that
        events = [event for event in self.ring.of(name) if event.seq >= agreed][:_REPORTED_EVENTS]
        if events and events[0].seq == agreed:
            events[0].word = 0  # its label is not in question, and the evidence for it takes a while to work out
        slept_sec = 0.0 if self.comparing is None else self.comparing.agreement.slept_sec()
        return RankStatus(
            -1 if session is None else session.rank,
            events,
            0 if group is None else group.seq,
            self.state.waits_in(name),
            self.position() or None,
            self.how_left,
            stack=main_stack(_STACK_FRAMES),
            slept_sec=slept_sec if slept_sec > self._settings.timeout_sec / 2 else 0.0,  # so others have waited so long
            messages=tuple(self.ring.of(name + MESSAGES)[-_REPORTED_MESSAGES:]),
            is_idle=self.comparing is not None and self.comparing.verdicts.is_idle(),
        )

    def take_verdict(self, finding: GuardFinding) -> None:
        """Take a verdict: labels that may differ are not compared on their lines any more, on any rank."""
        events = self.ring.silence(finding.group, finding.doubts)
        for event in events:
            if isinstance(event.evidence_source, Inferred):
                self._silenced.add(event.evidence_source.chain)
            elif finding.kind == NOTHING and event.label is not None:
                self._given_here[str(event.site)] += 1
        if finding.kind == DOUBT:  # of two lines in swapped order one warning is enough
            self.state.warnings += 1
            if self.session is not None and self.session.rank == min(finding.by_rank):
                log.warning("%s", finding.message)
            named = list(finding.by_rank.values())
            self._silenced.update(product({event.label for event in named}, {str(event.site) for event in named}))
        for event in list(self._known.values()):
            self._silence(event)
