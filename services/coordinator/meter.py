"""What steps and requests took, as only the shell sees it: time, flash, memory. For clients, monitors and the trace."""

from __future__ import annotations

from neuronpipe.native import lib
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.layouts.run import BOARD_FLASH, BOARD_MEMORY
from neuronpipe.protocol.messages.client import Finished, Token, WarmUp
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services import trace
from neuronpipe.services.coordinator.sequences import Cost, add_cost
from neuronpipe.services.coordinator.step_events import DoneStep, StepEvents
from neuronpipe.services.memory import RunMemory
from neuronpipe.services.trace import Trace


class Meter:
    """Reads the board before and after. neurons: how many the model has, over all layers and experts."""

    def __init__(self, memory: RunMemory, neurons: int, spans: Trace, events: StepEvents) -> None:
        self._board_memory = memory.view("board", "memory")
        self._board_flash = memory.view("board", "flash")
        self._neurons = neurons
        self._spans = spans
        self._events = events
        self._flash_at_start: dict[str, tuple[int, int]] = {}
        self._sent: Step | Prefill | None = None
        self._sent_ns = 0
        self._sent_flash = (0, 0)
        self._counters: Cost = {}  # of the participants of the step under way
        self._done: tuple[Step | Prefill, int, Cost, Cost] | None = None  # last step, when sent, its cost, its counters
        self._drawn = 0
        self._gap_ms = 0.0
        self._drawn_ns = 0  # when the tokens of the last step were drawn; later, when the step after it was sent
        self._told = 0

    def flash_now(self) -> tuple[int, int]:
        """(bytes, reads) of the loader so far."""
        return int(self._board_flash[BOARD_FLASH.index("bytes")]), int(self._board_flash[BOARD_FLASH.index("reads")])

    def warm_up_now(self) -> WarmUp | None:
        """What the loader has been asked to warm up, and how far it is; None before."""
        return WarmUp.on_board(self._board_flash)

    def memory_now(self) -> dict[str, int]:
        """Bytes of the whole run, by what they are used for."""
        return {name: int(self._board_memory[n]) for n, name in enumerate(BOARD_MEMORY)}

    # ---- a step ----------------------------------------------------------------------------------------------
    def sending(self, message: Step | Prefill) -> None:
        """A step is about to be sent, or to be sent again."""
        self._sent, self._sent_flash, self._counters = message, self.flash_now(), {}

    def sent(self, began_ns: int, seats: int) -> None:
        """It is sent."""
        self._sent_ns = self._spans.put(lib.NP_SPAN_SEND, began_ns, value=seats, step=self._step)
        if self._drawn_ns:
            self._drawn_ns = self._sent_ns  # clients are told of the step before from now on

    def answered(self, counters: Cost) -> None:
        """A participant is done with it."""
        add_cost(self._counters, {**counters, "answers": 1.0})

    def step_done(self) -> Cost:
        """Every participant is. What the step took since it was sent: milliseconds, and the loader's work."""
        assert self._sent is not None
        self._spans.put(lib.NP_SPAN_AWAIT, self._sent_ns, value=len(self._sent.tokens), step=self._step)
        (bytes_now, reads_now), (bytes_then, reads_then) = self.flash_now(), self._sent_flash
        cost: Cost = {
            "ms": (trace.now() - self._sent_ns) / 1e6,
            "read_bytes": bytes_now - bytes_then,
            "reads": reads_now - reads_then,
        }
        self._done = self._sent, self._sent_ns, cost, self._counters
        return cost

    def drawn(self, began_ns: int, tokens: int) -> None:
        """Its tokens are drawn."""
        self._drawn = tokens
        self._drawn_ns = self._spans.put(lib.NP_SPAN_SAMPLE, began_ns, value=tokens, step=self._step)

    def told(self, message: Message) -> None:
        """A client was told of it."""
        self._told += 1
        if isinstance(message, Token) and message.index:
            self._gap_ms = max(self._gap_ms, message.ms)

    def end_of_telling(self) -> None:
        """Whatever a step's tokens led to is done: text and messages to clients."""
        if self._done is not None:
            step, sent_ns, cost, counters = self._done
            if self._drawn_ns:
                self._spans.put(lib.NP_SPAN_TELL, self._drawn_ns, value=self._told, step=step.step)
            self._events.add(DoneStep(step, sent_ns, cost, counters, self._drawn, self._gap_ms))
        self._done = None
        self._drawn_ns = self._told = self._drawn = 0
        self._gap_ms = 0.0

    @property
    def _step(self) -> int:
        return self._sent.step if self._sent else 0

    # ---- a request -------------------------------------------------------------------------------------------
    def request_came(self, client: str, request: str) -> None:
        """What is read from flash from now on is read while this request is served."""
        self._flash_at_start.setdefault(f"{client}/{request}", self.flash_now())

    def request_refused(self, client: str, request: str) -> None:
        """Nobody will ask what it took."""
        self._flash_at_start.pop(f"{client}/{request}", None)

    def request_finished(self, client: str, finished: Finished) -> Finished:
        """Add what the core cannot know: memory and flash."""
        bytes_now, reads_now = self.flash_now()
        bytes_before, reads_before = self._flash_at_start.pop(f"{client}/{finished.request}", (0, 0))
        total: Cost = {}
        add_cost(total, finished.prefill)
        add_cost(total, finished.decode)
        looked_up = total.get("trigger_clusters", 0.0) + total.get("value_clusters", 0.0)
        missed = total.get("trigger_missed", 0.0) + total.get("value_missed", 0.0)
        flash = {
            "bytes": float(bytes_now - bytes_before),
            "reads": float(reads_now - reads_before),
            "miss_rate": missed / looked_up if looked_up else 0.0,
            "wait_ms": total.get("flash_ms", 0.0) * total.get("steps", 0.0) / max(1.0, total.get("answers", 0.0)),
            "active_share": total.get("active", 0.0) / max(1.0, total.get("tokens", 0.0) * self._neurons),
        }
        values = {name: getattr(finished, name) for name in Finished.__dataclass_fields__}
        return Finished(**{**values, "flash": flash, "memory": self.memory_now()})
