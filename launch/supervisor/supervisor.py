"""The supervisor: starts the processes of a run, watches them, starts them again, and leaves nothing behind.

It is also the warmed parent: everything a role needs is imported once, before the first fork, so that the pages are
shared. It holds all segments, so that no worker's death loses one; it opens no ZeroMQ context, whose threads would
not survive a fork.

    event                     what it does
    a process dies            board line cleared, epoch advanced (everybody leaves the step), process started again
    it does not answer        it is killed (watchdog.py), and dies so; the same where the coordinator says that it keeps
                              the run waiting. The third time, or where it never was ready, the run ends
    it dies too often         the run ends with a message, and with status OVERCOME; without an accelerator it goes on
    it exits with status 2    the user's mistake (its message is in the file `failure`): the run ends with that message
    a request (control.py)    processes are replaced (replacement.py); where the new implementation dies again and
                              again later, the one before it comes back
    SIGTERM, SIGINT, SIGHUP,  the coordinator ends the others and then itself; processes that are left get SIGTERM,
    an "end" request          then SIGKILL. The gateway ends last: it answers clients until then
    SIGURG                    the run is used: memory is measured, for a while; without use, and while memory is not
                              short, it sleeps but for a look every IDLE_LOOK_S
    SIGQUIT                   the same without waiting. A second SIGTERM does not mean that: a service manager sends
                              SIGTERM to the command and to the supervisor at once
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Container

from neuronpipe.launch.supervisor.control import ControlSocket, answer
from neuronpipe.launch.supervisor.deaths import WITHIN_S, Causes, RestartBudget
from neuronpipe.launch.supervisor.logs import ProcessLogs
from neuronpipe.launch.supervisor.memory_watch import MemoryWatch
from neuronpipe.launch.supervisor.overdue import Overdue
from neuronpipe.launch.supervisor.replacement import ProcessKey, Replacement
from neuronpipe.launch.supervisor.watchdog import Watchdog, sights_of
from neuronpipe.native import lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import ACCELERATOR, BACKEND_ROLES, DEFAULT_BACKEND, GATEWAY, Plan, ProcessSpec
from neuronpipe.plans.plan.segment_sizes import private_layouts
from neuronpipe.protocol.codec import VERSION
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.layout import LINE_WORDS
from neuronpipe.protocol.layouts.run import BOARD_WORDS
from neuronpipe.protocol.run_directory import RunDirectory, RunFile, SegmentHandle, own_pid, started
from neuronpipe.protocol.segments import Segment
from neuronpipe.services.coordinator.sleep import BOARD_CHANGED
from neuronpipe.services.monitor.process_usage import helpers_of
from neuronpipe.services.runtime.core_pinning import pin
from neuronpipe.services.runtime.implementations import OURS, Implementation, Implementations, implementation_facts
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.listener import Listener
from neuronpipe.services.runtime.pulse import Pulse, shared_words
from neuronpipe.services.runtime.run_memory import Epoch, RunMemory, create_segments
from neuronpipe.services.runtime.run_summary import run_summary
from neuronpipe.services.steps.backend import BACKENDS

OVERCOME = 3  # exit status: a process died too often, which another run may be spared
DRAIN_S, TERMINATE_S, KILL_S = 1.5, 1.0, 10.0
START_ORDER = tuple(OURS)
REPLACEMENT_POLL_S = 0.002
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HASTEN = signal.SIGQUIT


def preload(roles: Container[str] = OURS) -> None:
    """Import what these roles need, once, in the parent of all: a run without a gateway needs no HTTP server."""
    needed = [implementation for role, implementation in OURS.items() if role in roles]
    for implementation in (*needed, BACKENDS[DEFAULT_BACKEND]):
        importlib.import_module(implementation.partition(":")[0])


class Supervisor:
    """One run. `watched` are processes whose memory counts and that are not children: the client that started the
    run. report: a pipe whose reader is that client. uses: what does the roles' work. listener: the gateway's, if the
    plan has one. fixed: the fixed tensors, where another run has loaded them."""

    def __init__(
        self,
        directory: RunDirectory,
        package: Package,
        plan: Plan,
        watched: tuple[int, ...],
        uses: Implementations,
        listener: Listener | None = None,
        fixed: Segment | None = None,
        report: int | None = None,
    ) -> None:
        self._directory, self._package, self._plan = directory, package, plan
        self._watched, self._listener, self._report = watched, listener, report
        self._specs = sorted(plan.compute.processes, key=lambda spec: (START_ORDER.index(spec.role), spec.index))
        self._lines = {(spec.role, spec.index): n for n, spec in enumerate(plan.compute.processes)}
        self._processes: dict[int, ProcessSpec] = {}
        self._implementations = {key: uses.of(*key) for key in self._lines}
        self._earlier: dict[ProcessKey, Implementation] = {}  # of processes that were replaced
        self._replacement: Replacement | None = None
        self._control = ControlSocket(directory.path)
        self._logs = ProcessLogs(directory.path)
        self._incarnations = dict.fromkeys(self._lines, 0)
        self._verdicts: dict[ProcessKey, str] = {}  # why processes that were killed are not started again
        self._budget, self._causes = RestartBudget(self._incarnations), Causes()
        self._segments = create_segments(package.manifest, plan, fixed)
        self._memory = RunMemory.open("supervisor", self._segments)
        self._epoch = Epoch(self._memory)
        self._board = self._memory.view("board", "processes")
        self._leaving = self._memory.view("board", "leaving")
        self._ready = self._memory.view("board", "ready")
        self._quarantined = self._memory.view("board", "quarantined")
        self._memory_watch = MemoryWatch(plan, self._segments, self._memory)
        self._overdue = Overdue(self._lines, self._memory, directory.path)
        self._spans = self._memory.view("trace", "next")[:: LINE_WORDS // 2]
        self._watchdog, self._pulses = Watchdog(), shared_words(len(self._lines))
        self._run = os.urandom(6).hex()
        self._stopping = self._hasty = False
        self.failure: str | None = None
        self.overcome = False

    def run(self) -> None:
        """Start everything, serve until told to stop, end everything."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, BOARD_CHANGED):
            signal.signal(number, lambda *_: None)  # the wake-up is all
        for number in (*STOPPING, HASTEN):
            signal.signal(number, self._told_to_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPPING, HASTEN))  # they waited since the fork
        self._publish()
        preload({role for role, _ in self._lines})
        gc.collect()
        gc.freeze()  # the collector would touch, and so copy, every shared page
        try:
            for spec in self._specs:
                if not self._stopping:
                    self._start(spec)
            while not self._stopping and self.failure is None:
                ready = self._sleep(wake_read)
                if wake_read in ready and BOARD_CHANGED in os.read(wake_read, 4096):
                    self._memory_watch.used()
                if self._memory_watch.stall_trigger in ready:
                    self._memory_watch.stalled()
                self._reap()
                self._watch(at_once=wake_read in ready)
                self._replace_overdue()
                if not ready.isdisjoint(self._control.descriptors()):
                    self._answer_requests()
                self._watch_replacement()
                self._measure()
                if self._report in ready or (self._watched and os.getppid() not in self._watched):
                    self._stopping = True  # the command that started this run is gone
        finally:
            self._shut_down()

    def _sleep(self, wake: int) -> set[int]:
        """Wait for something to happen, or for the next look. Returns the descriptors on which it happened."""
        poller = select.poll()
        for descriptor in (wake, *self._control.descriptors()):
            poller.register(descriptor, select.POLLIN)
        if self._memory_watch.stall_trigger is not None:
            poller.register(self._memory_watch.stall_trigger, select.POLLPRI)
        if self._watched and self._report is not None:
            poller.register(self._report, 0)  # it fails when the client that reads it is gone
        patience_s = min(self._memory_watch.due_at, self._watchdog.due_at) - time.monotonic()
        if self._replacement is not None:
            patience_s = min(patience_s, REPLACEMENT_POLL_S)
        return {descriptor for descriptor, _ in poller.poll(max(0.0, 1000 * patience_s))}

    def _nudge_coordinator(self) -> None:
        """The board has changed: a coordinator that sleeps looks at it."""
        for pid, spec in self._processes.items():
            if spec.role == "coordinator":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, BOARD_CHANGED)

    def _told_to_stop(self, number: int, _: object) -> None:
        self._stopping = True
        self._hasty |= number == HASTEN

    def _publish(self) -> None:
        """run.json: clients get descriptors they can only read."""
        handles = {
            name: SegmentHandle(
                fd=segment.read_only().fd, total_bytes=segment.layout.total_bytes, layout=segment.layout.text
            )
            for name, segment in self._segments.items()
        }
        pid = own_pid()
        self._directory.publish(
            RunFile(
                protocol=VERSION,
                run=self._run,
                supervisor_pid=pid,
                supervisor_started=started(pid),
                endpoints=self._directory.endpoints(),
                segments=handles,
                plan=self._plan.id,
                package=str(self._package.path.resolve()),
                private={
                    name: layout.text for name, layout in private_layouts(self._package.manifest, self._plan).items()
                },
                summary=run_summary(self._package, self._plan, self._segments),
            ),
            self._plan.to_json(),
        )

    # ---- requests, and processes that are replaced -----------------------------------------------------------
    def _answer_requests(self) -> None:
        for client, request in self._control.requests():
            try:
                if request.get("ask") == "implementations":
                    answer(client, implementation_facts(self._implementations))
                elif request.get("ask") == "end":
                    answer(client, {"ending": True})
                    self._stopping = True
                elif request.get("ask") != "swap":
                    raise ValueError("ask: none of implementations, swap, end")
                elif self._replacement is not None:
                    raise ValueError("other processes are being replaced just now; try again")
                else:
                    self._replacement = Replacement.parse(request, self._implementations, client, time.monotonic())
                    for key in self._replacement.phases:
                        self._leaving[self._lines[key]] = 1
                    self._nudge_coordinator()
            except (ValueError, UserError) as error:
                answer(client, {"error": str(error)})

    def _watch_replacement(self) -> None:
        """Whether the new processes are welcomed by now, or late."""
        replacement = self._replacement
        if replacement is None:
            return
        draining = {key for key, phase in replacement.phases.items() if phase == "draining"}
        all_ready = all(self._ready[self._lines[key]] == self._incarnations[key] + 1 for key in replacement.phases)
        if not draining and all_ready:
            self._earlier |= replacement.before
            self._replacement = None
            pids = {f"{spec.role}.{spec.index}": pid for pid, spec in self._processes.items()}
            answer(replacement.client, {"pids": {f"{role}.{n}": pids[f"{role}.{n}"] for role, n in replacement.phases}})
        elif time.monotonic() > replacement.deadline:
            if draining:
                replacement.deadline = time.monotonic() + replacement.patience_s
                self._kill(draining)
            else:
                self._give_up(f"was not ready within {replacement.patience_s:.0f} s")

    def _give_up(self, why: str) -> None:
        """The old implementations come back; the new processes are killed."""
        replacement, self._replacement = self._replacement, None
        assert replacement is not None
        self._implementations |= replacement.before
        for key in replacement.phases:
            self._leaving[self._lines[key]] = 0
        self._nudge_coordinator()
        self._kill({key for key, phase in replacement.phases.items() if phase == "starting"})
        answer(replacement.client, {"error": why})

    def _watch(self, *, at_once: bool) -> None:
        """End processes that do not answer: they are then replaced as dead ones are. at_once: a signal has come, which
        may mean that a process was stopped."""
        now = time.monotonic()
        if now < self._watchdog.due_at and not at_once:
            return
        words = {
            pid: (spec.role in BACKEND_ROLES, self._pulses[self._lines[spec.role, spec.index]])
            for pid, spec in self._processes.items()
        }
        for overdue in self._watchdog.look(sights_of(words, sum(self._spans)), now):
            self._logs.note(self._processes[overdue.pid], f"ended by the watchdog: {overdue.why}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(overdue.pid, signal.SIGABRT if overdue.aborts else signal.SIGKILL)

    def _replace_overdue(self) -> None:
        """Kill processes that keep the run waiting, as the coordinator says."""
        self._pardon()
        replaced = self._replacement.phases.keys() if self._replacement is not None else set()
        for key, reason in self._overdue.take(self._incarnations, self._implementations, replaced).items():
            spec = next(spec for spec in self._specs if (spec.role, spec.index) == key)
            self._logs.note(spec, f"ended by the supervisor: it {reason}")
            if self._overdue.is_hopeless(key, time.monotonic()):
                command = self._implementations[key].text
                self._verdicts[key] = f"{spec.role}.{spec.index} ({command}) {reason}{self._logs.kept(spec)}"
            # What a worker computes may be the cause: that is a crash, and counts against the request.
            self._kill({key}, signal.SIGABRT if key[0] in BACKEND_ROLES else signal.SIGKILL)

    def _kill(self, keys: set[ProcessKey], number: signal.Signals = signal.SIGKILL) -> None:
        for pid, spec in self._processes.items():
            if (spec.role, spec.index) in keys:
                os.kill(pid, number)

    # ---- processes -------------------------------------------------------------------------------------------
    def _start(self, spec: ProcessSpec) -> None:
        key = (spec.role, spec.index)
        self._logs.begin(spec)
        parent = os.getpid()
        line = self._lines[key] * LINE_WORDS
        self._board[line + 1] = self._incarnations[key]  # before the process can say Hello
        self._board[line + BOARD_WORDS.index("gone")] = 0
        self._pulses[self._lines[key]] = 0
        pid = os.fork()
        if pid == 0:
            self._become(spec, parent)
        self._processes[pid] = spec
        self._board[line] = pid

    def _become(self, spec: ProcessSpec, parent: int) -> None:
        """In the child: be the service, and never return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGHUP, HASTEN, signal.SIGCHLD, BOARD_CHANGED):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()  # Ctrl-C is for the one who typed the command; it reaches us as a drain
            lib.np_process_die_with(parent)
            lib.np_process_name(f"np-{spec.role}.{spec.index}".encode())
            listener = self._listener if spec.role == GATEWAY else None
            self._logs.take_streams(spec, set() if listener is None else {listener.descriptor})
            pin(spec.core)
            job = Job(
                run=self._run,
                process=spec,
                incarnation=self._incarnations[(spec.role, spec.index)],
                package=self._package,
                plan=self._plan,
                directory=self._directory,
                segments=self._segments,
                listener=listener,
                pulse=Pulse(self._pulses, self._lines[(spec.role, spec.index)]),
            )
            self._implementations[(spec.role, spec.index)].serve(job)
            code = 0
        except UserError as error:
            self._logs.fail(str(error))
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):  # a child that got past here would be a second supervisor
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._processes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._processes:
                self._lost(self._processes.pop(pid), pid, os.waitstatus_to_exitcode(status))

    def _lost(self, spec: ProcessSpec, pid: int, code: int) -> None:
        """A process has ended: everybody leaves the step, and it is started again unless that is hopeless."""
        key = (spec.role, spec.index)
        line = self._lines[key] * LINE_WORDS
        replacement = self._replacement
        self._incarnations[key] += 1
        self._board[line + BOARD_WORDS.index("signal")] = self._causes.signal_from_outside(code)
        if replacement is None or key not in replacement.phases:
            self._board[line + BOARD_WORDS.index("restarts")] += 1
        self._board[line], self._board[line + 1] = (
            0,
            self._incarnations[key],
        )  # before the epoch: readers then see which
        if spec.role != GATEWAY:  # no step waits for it
            self._epoch.advance()
        self._nudge_coordinator()
        if self._stopping:
            return
        if replacement is not None and replacement.phases.get(key) == "draining":
            self._leaving[self._lines[key]] = 0
            self._implementations[key] = replacement.old_process_ended(key, time.monotonic())
            self._start(spec)
            return
        said = self._verdicts.pop(key, None) or (self._logs.failure() if code == 2 else None)
        if replacement is not None and key in replacement.phases:
            self._give_up(f"ended before it was ready: {said or self._logs.last_words(spec)}")
            self._start(spec)
            return
        if said is not None:
            self._hopeless(spec, said)
            return
        self._pardon()
        if (deaths := self._budget.count(key, time.monotonic())) is not None:
            often = f"{spec.role}.{spec.index} died {deaths} times within {WITHIN_S:.0f} s"
            self._hopeless(spec, f"{often}: {self._logs.last_words(spec)}")
            self.overcome = self.failure is not None
            return
        self._start(spec)

    def _pardon(self) -> None:
        refused_requests = self._quarantined[0]
        self._budget.pardon(refused_requests, self._earlier.keys())
        self._overdue.pardon(refused_requests, self._implementations)

    def _hopeless(self, spec: ProcessSpec, why: str) -> None:
        """The implementation cannot do this work: the one before it comes back, or the run ends. An accelerator that
        was there once is done without."""
        key = (spec.role, spec.index)
        if key not in self._earlier:
            if spec.role != ACCELERATOR or not self._ready[self._lines[key]]:
                self.failure = why
            else:  # what an accelerator did at first, the decode workers do from now on
                self._board[self._lines[key] * LINE_WORDS + BOARD_WORDS.index("gone")] = 1
                self._nudge_coordinator()
            return
        self._implementations[key] = self._earlier.pop(key)
        self._budget.clear(key)
        self._start(spec)

    def _measure(self) -> None:
        foreign = self._implementations["coordinator", 0] != Implementations().of("coordinator", 0)
        if self._memory_watch.look(
            [*self._processes, *helpers_of(self._processes), *self._watched], always_used=foreign
        ):
            self._nudge_coordinator()

    # ---- the end ---------------------------------------------------------------------------------------------
    def _shut_down(self) -> None:
        """Drain, then terminate, then kill; then remove the run directory."""
        self._stopping = True
        if self._replacement is not None:
            answer(self._replacement.client, {"error": "the run is ending"})
        first = [pid for pid, spec in self._processes.items() if spec.role == "coordinator"]
        self._leaving[self._lines["coordinator", 0]] = 1  # it has no successor: the run ends with it
        drain_s = DRAIN_S if self.failure is None else 0.0  # a failed run has nothing to finish
        for pids, number, patience_s, hurries in (
            (first, signal.SIGTERM, drain_s, True),
            (list(self._processes), signal.SIGTERM, TERMINATE_S, True),
            (list(self._processes), signal.SIGKILL, KILL_S, False),
        ):
            for pid in pids:
                if pid in self._processes:
                    os.kill(pid, number)
            deadline = time.monotonic() + (patience_s if pids else 0.0)
            while self._awaited(pids) and time.monotonic() < deadline and not (hurries and self._hasty):
                self._reap()
                time.sleep(0.002)
        self._directory.remove()

    def _awaited(self, told: list[int]) -> bool:
        """Whether anybody is left who is to go now: of the gateway nothing is expected before it is told."""
        return any(spec.role != GATEWAY or pid in told for pid, spec in self._processes.items())
