"""A launcher on a node other than the first: reports to node 0's, and ends when that says so.

If node 0 is lost, this node's processes have nobody to work with and are ended all the same.
"""

import signal
import time
from typing import Any

from unisono.launch.failure import Failure, Outcome, describe, ended_well, signal_name
from unisono.launch.nodes import Peer
from unisono.launch.process_watch import BEAT_S, Watch

_ANSWER_S = 3.0
_OVER_S = 8.0


class Follower:
    """The part of every node but node 0."""

    def __init__(self, watch: Watch, chief: Peer) -> None:
        self._watch = watch
        self._chief = chief
        self._failures: list[Failure] = []
        self._deadline: float | None = None
        self._interrupted: list[int] = []
        self._last_beat = 0.0
        self._is_done_told = False
        self._is_ended = False
        self._over: Outcome | None = None

    def interrupt(self, number: int) -> None:
        """End the run, as the user or the system asks by a signal; asked twice, at once."""
        self._interrupted.append(number)
        if len(self._interrupted) > 1:
            self._watch.ranks.signal_groups(signal.SIGKILL)

    def warn(self) -> None:
        """Pass on that the run must soon make room."""
        self._watch.warn()

    def conduct(self) -> Outcome:
        """See the run to its end."""
        while self._over is None:
            self._go_on()
            if self._interrupted and not self._is_ended:
                number = self._interrupted[0]
                cause = f"was told to end the run by {signal_name(number)}"
                host = self._watch.host
                self._note(Failure("interrupt", cause, 128 + number, host=host))
                self._end(number)
            if self._is_chief_lost():
                return self._end_alone()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._end(signal.SIGTERM)
                if time.monotonic() > self._deadline + _OVER_S:
                    return self._end_alone()
        if not self._is_ended and not self._watch.is_done:
            self._watch.end(signal.SIGTERM, self._beat)
        return self._over

    def _go_on(self) -> None:
        found = self._watch.wait([] if self._chief.is_gone else [self._chief])
        if not self._is_ended:
            for failure in found:
                self._note(failure)
        self._beat()
        if self._watch.is_done and not self._is_done_told:
            self._is_done_told = True
            has_made_room = self._watch.has_made_room
            self._chief.send({"do": "done", "has_made_room": has_made_room})
        for message in self._chief.receive():
            getattr(self, f"_do_{message['do']}")(message)

    def _beat(self) -> None:
        if time.monotonic() > self._last_beat + BEAT_S:
            self._last_beat = time.monotonic()
            self._chief.send({"do": "alive", "stopped": self._watch.stopped()})

    def _note(self, failure: Failure) -> None:
        self._failures.append(failure)
        self._chief.send({"do": "failed", "failure": failure.to_message()})
        if self._deadline is None:
            # Node 0 will say when to end; if it does not, we do.
            self._deadline = time.monotonic() + _ANSWER_S

    def _do_alive(self, message: dict[str, Any]) -> None:
        pass

    def _do_stacks(self, message: dict[str, Any]) -> None:
        stacks, names = self._watch.stacks(self._beat)
        self._chief.send({"do": "stacks", "stacks": stacks, "names": names})

    def _do_end(self, message: dict[str, Any]) -> None:
        self._end(int(message["signal"]))

    def _do_over(self, message: dict[str, Any]) -> None:
        if "failure" in message:
            first = Failure.from_message(message["failure"])
            self._over = Outcome(first.code, str(message["text"]), first)
        else:
            self._over = ended_well(bool(message["has_made_room"]))

    def _end(self, number: int) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        self._watch.end(number, self._beat)
        self._chief.send({"do": "ended"})
        self._deadline = time.monotonic()

    def _is_chief_lost(self) -> bool:
        now = time.monotonic()
        is_silent = now - self._chief.last_word > self._watch.silence_s
        return self._chief.is_gone or (is_silent and now > self._watch.pardon_until)

    def _end_alone(self) -> Outcome:
        self._end(signal.SIGTERM)
        how = self._chief.how_lost
        if not self._chief.is_gone:
            silence_s = time.monotonic() - self._chief.last_word
            how = f"nothing was heard of it for {silence_s:.0f} s"
        host = f"node 0 ({self._chief.name})"
        lost = Failure("node", f"is lost: {how}", host=host)
        return Outcome(lost.code, describe([lost, *self._failures], {}, {}), lost)
