"""The supervisor: starts the processes of a run, watches and restarts them, and cleans up at the end.

The command that forks it has imported what the roles need, so that all processes share these pages. It holds all
segments, so that no worker's death loses one. It opens no ZeroMQ context, whose threads would not survive a fork.

    event                     reaction
    a process ends            its line on the board is cleared, the epoch advances (all others leave the step), and it
                              is started again
    it does not answer        it is killed (watchdog.py) and restarted; the same if the coordinator reports that it
                              keeps the run waiting. The third time, or if it never was ready, the run ends
    its restart budget ends   the run ends with a message and status EXHAUSTED; without an accelerator it goes on
    it exits with status 2    a mistake of the user: the run ends with the message in the file `failure`
    a request (control.py)    processes are replaced (replacement.py); where the run would end because of the new
                              implementation, the previous one is started again
    SIGTERM, SIGINT, SIGHUP,  the coordinator ends the other processes and then itself; what is left gets SIGTERM, then
    an "end" request          SIGKILL. The gateway ends last, because it answers clients until then
    SIGURG                    the run is in use: memory is measured for a while. Otherwise, unless memory is short, the
                              supervisor sleeps and looks every IDLE_LOOK_S
    SIGQUIT                   the same as SIGTERM without waiting
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import time
import traceback

from neuronpipe.launch.supervisor.control import ControlSocket, answer
from neuronpipe.launch.supervisor.deaths import WITHIN_S, Causes, RestartBudget
from neuronpipe.launch.supervisor.idle_profile import IdleProfile, MeasuringProcess
from neuronpipe.launch.supervisor.logs import ProcessLogs
from neuronpipe.launch.supervisor.memory_watch import MemoryWatch
from neuronpipe.launch.supervisor.overdue import Overdue
from neuronpipe.launch.supervisor.published_run import publish
from neuronpipe.launch.supervisor.replacement import ProcessKey, Replacement
from neuronpipe.launch.supervisor.run_history import RunHistory
from neuronpipe.launch.supervisor.watchdog import Watchdog, observe_run
from neuronpipe.native import lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import ACCELERATOR, BACKEND_ROLES, GATEWAY, Plan, ProcessSpec
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.layouts.run import BOARD_WORDS
from neuronpipe.protocol.memory.layout import LINE_WORDS
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.coordinator.sleep import BOARD_CHANGED
from neuronpipe.services.monitor.process_usage import helpers_of
from neuronpipe.services.runtime.core_pinning import pin
from neuronpipe.services.runtime.implementations import OURS, Implementation, Implementations, implementation_facts
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.listener import Listener
from neuronpipe.services.runtime.pulse import Pulse, shared_words
from neuronpipe.services.runtime.run_memory import Epoch, RunMemory, create_segments

EXHAUSTED = 3  # exit status: a process exceeded its restart budget; another run may fare better
DRAIN_S, TERMINATE_S, KILL_S = 1.5, 1.0, 10.0
START_ORDER = tuple(OURS)
REPLACEMENT_POLL_S = 0.002
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HASTEN = signal.SIGQUIT


class Supervisor:
    """The supervisor of one run.

    watched: processes that are not children but whose memory counts: the command that started the run
    uses: implementations that replace built-in ones
    listener: the gateway's, if the plan has a gateway
    fixed: the fixed tensors, if another run has loaded them
    report: pipe whose reader is the command that started the run
    measures_idle: whether the device profile is measured while the run is idle (idle_profile.py)
    keeps_history: what the run counts and measures is kept for the next plan
    failure: why the run ends, if not on request
    is_exhausted: whether a process exceeded its restart budget
    """

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
        *,
        measures_idle: bool = False,
        keeps_history: bool = False,
    ) -> None:
        self._directory, self._package, self._plan = directory, package, plan
        self._watched, self._listener, self._report = watched, listener, report
        self._specs = sorted(plan.compute.processes, key=lambda spec: (START_ORDER.index(spec.role), spec.index))
        self._lines = {(spec.role, spec.index): n for n, spec in enumerate(plan.compute.processes)}
        self._processes: dict[int, ProcessSpec] = {}
        self._implementations = {key: uses.of(*key) for key in self._lines}
        self._earlier: dict[ProcessKey, Implementation] = {}  # before the replacements of this run
        self._replacement: Replacement | None = None
        self._control = ControlSocket(directory.path)
        self._logs = ProcessLogs(directory.path)
        self._incarnations = dict.fromkeys(self._lines, 0)
        self._fatal: dict[ProcessKey, str] = {}  # why processes that were killed must not be started again
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
        self._history = RunHistory(package, plan, self._memory, is_kept=keeps_history)
        self._spans = self._memory.view("trace", "next")[:: LINE_WORDS // 2]
        self._watchdog, self._pulses = Watchdog(), shared_words(len(self._lines))
        measuring = MeasuringProcess(package.path, directory.path)
        self._idle_profile = IdleProfile(
            self._memory.view("board", "texts")[1:2],
            self._memory.view("board", "device_profile"),
            lambda: not self._memory_watch.warms_up and not self._has_foreign_coordinator,
            measuring if measures_idle else None,
            time.monotonic(),
        )
        self._run = os.urandom(6).hex()
        self._stopping = self._hasty = False
        self.failure: str | None = None
        self.is_exhausted = False

    def run(self) -> None:
        """Start all processes, supervise them until the end of the run, and end them."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, BOARD_CHANGED):
            signal.signal(number, lambda *_: None)  # only for the wake-up
        for number in (*STOPPING, HASTEN):
            signal.signal(number, self._on_stop_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPPING, HASTEN))  # blocked since the fork
        publish(self._directory, self._run, self._package, self._plan, self._segments)
        gc.collect()
        gc.freeze()  # the collector would write to every shared page, and so copy it
        try:
            for spec in self._specs:
                if not self._stopping:
                    self._start(spec)
            while not self._stopping and self.failure is None:
                ready = self._sleep(wake_read)
                if wake_read in ready and BOARD_CHANGED in os.read(wake_read, 4096):
                    self._memory_watch.note_use()
                if self._memory_watch.stall_trigger in ready:
                    self._memory_watch.note_stall()
                self._reap()
                self._watch(at_once=wake_read in ready)
                self._replace_overdue()
                if not ready.isdisjoint(self._control.descriptors()):
                    self._answer_requests()
                self._watch_replacement()
                self._idle_profile.look(time.monotonic())
                self._measure()
                if self._report in ready or (self._watched and os.getppid() not in self._watched):
                    self._stopping = True  # the command that started this run is gone
        finally:
            self._shut_down()

    def _sleep(self, wake: int) -> set[int]:
        """Wait for an event or for the next look. Return the descriptors that are ready."""
        poller = select.poll()
        for descriptor in (wake, *self._control.descriptors()):
            poller.register(descriptor, select.POLLIN)
        if self._memory_watch.stall_trigger is not None:
            poller.register(self._memory_watch.stall_trigger, select.POLLPRI)
        if self._watched and self._report is not None:
            poller.register(self._report, 0)  # an error means that the command that reads it is gone
        due_at = min(self._memory_watch.due_at, self._watchdog.due_at, self._idle_profile.due_at)
        timeout_s = due_at - time.monotonic()
        if self._replacement is not None:
            timeout_s = min(timeout_s, REPLACEMENT_POLL_S)
        return {descriptor for descriptor, _ in poller.poll(max(0.0, 1000 * timeout_s))}

    def _nudge_coordinator(self) -> None:
        for pid, spec in self._processes.items():
            if spec.role == "coordinator":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, BOARD_CHANGED)

    def _on_stop_signal(self, number: int, _: object) -> None:
        self._stopping = True
        self._hasty |= number == HASTEN

    # ---- requests and replacements -----------------------------------------------------------
    def _answer_requests(self) -> None:
        for client, request in self._control.requests():
            try:
                if request.get("ask") == "implementations":
                    answer(client, implementation_facts(self._implementations))
                elif request.get("ask") == "end":
                    answer(client, {"ending": True})
                    self._stopping = True
                elif request.get("ask") != "swap":
                    raise ValueError("ask: expected implementations, swap or end")
                elif self._replacement is not None:
                    raise ValueError("other processes are being replaced; try again")
                else:
                    self._replacement = Replacement.parse(request, self._implementations, client, time.monotonic())
                    for key in self._replacement.phases:
                        self._leaving[self._lines[key]] = 1
                    self._nudge_coordinator()
            except (ValueError, UserError) as error:
                answer(client, {"error": str(error)})

    def _watch_replacement(self) -> None:
        """Finish the replacement when the new processes are ready, and undo it when they are late."""
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
                self._undo_replacement(f"was not ready within {replacement.patience_s:.0f} s")

    def _undo_replacement(self, reason: str) -> None:
        replacement, self._replacement = self._replacement, None
        assert replacement is not None
        self._implementations |= replacement.before
        for key in replacement.phases:
            self._leaving[self._lines[key]] = 0
        self._nudge_coordinator()
        self._kill({key for key, phase in replacement.phases.items() if phase == "starting"})
        answer(replacement.client, {"error": reason})

    def _watch(self, *, at_once: bool) -> None:
        """Kill processes that do not answer.

        at_once: a signal has come, perhaps because a process was stopped
        """
        now = time.monotonic()
        if now < self._watchdog.due_at and not at_once:
            return
        words = {
            pid: (spec.role in BACKEND_ROLES, self._pulses[self._lines[spec.role, spec.index]])
            for pid, spec in self._processes.items()
        }
        for overdue in self._watchdog.look(observe_run(words, sum(self._spans)), now):
            self._logs.note(self._processes[overdue.pid], f"ended by the watchdog: {overdue.why}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(overdue.pid, signal.SIGABRT if overdue.aborts else signal.SIGKILL)

    def _replace_overdue(self) -> None:
        self._pardon()
        replaced = self._replacement.phases.keys() if self._replacement is not None else set()
        for key, reason in self._overdue.take(self._incarnations, self._implementations, replaced).items():
            spec = next(spec for spec in self._specs if (spec.role, spec.index) == key)
            self._logs.note(spec, f"ended by the supervisor: it {reason}")
            if self._overdue.is_hopeless(key, time.monotonic()):
                command = self._implementations[key].text
                self._fatal[key] = f"{spec.role}.{spec.index} ({command}) {reason}{self._logs.save(spec)}"
            # For a worker the request may be the cause: SIGABRT is a crash, and counts against the request.
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
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGHUP, HASTEN, signal.SIGCHLD, BOARD_CHANGED):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()  # Ctrl-C is for the command, which ends the run in order
            lib.np_process_die_with(parent)
            lib.np_process_name(f"np-{spec.role}.{spec.index}".encode())
            listener = self._listener if spec.role == GATEWAY else None
            self._logs.redirect_streams(spec, set() if listener is None else {listener.descriptor})
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
            with contextlib.suppress(OSError):  # an exception here would make the child a second supervisor
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._processes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self._processes:
                self._handle_end(self._processes.pop(pid), code)
            else:
                self._idle_profile.process_ended(pid, code, time.monotonic())

    def _handle_end(self, spec: ProcessSpec, code: int) -> None:
        """Make all processes leave the step, and start the process that has ended again unless that is hopeless."""
        key = (spec.role, spec.index)
        line = self._lines[key] * LINE_WORDS
        replacement = self._replacement
        self._incarnations[key] += 1
        self._board[line + BOARD_WORDS.index("signal")] = self._causes.signal_from_outside(code)
        if replacement is None or key not in replacement.phases:
            self._board[line + BOARD_WORDS.index("restarts")] += 1
        # Before the epoch, so that those who see the new epoch also see which process has ended.
        self._board[line], self._board[line + 1] = 0, self._incarnations[key]
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
        reason = self._fatal.pop(key, None) or (self._logs.failure() if code == 2 else None)
        if replacement is not None and key in replacement.phases:
            self._undo_replacement(f"ended before it was ready: {reason or self._logs.last_words(spec)}")
            self._start(spec)
            return
        if reason is not None:
            self._fall_back_or_fail(spec, reason)
            return
        self._pardon()
        if (deaths := self._budget.count(key, time.monotonic())) is not None:
            summary = f"{spec.role}.{spec.index} died {deaths} times within {WITHIN_S:.0f} s"
            self._fall_back_or_fail(spec, f"{summary}: {self._logs.last_words(spec)}")
            self.is_exhausted = self.failure is not None
            return
        self._start(spec)

    def _pardon(self) -> None:
        refused_requests = self._quarantined[0]
        self._budget.pardon(refused_requests, self._earlier.keys())
        self._overdue.pardon(refused_requests, self._implementations)

    def _fall_back_or_fail(self, spec: ProcessSpec, reason: str) -> None:
        """Go back to the implementation before the replacement, or end the run.

        The run goes on without an accelerator that was ready once: the decode workers compute its blocks.
        """
        key = (spec.role, spec.index)
        if key not in self._earlier:
            if spec.role != ACCELERATOR or not self._ready[self._lines[key]]:
                self.failure = reason
            else:
                self._board[self._lines[key] * LINE_WORDS + BOARD_WORDS.index("gone")] = 1
                self._nudge_coordinator()
            return
        self._implementations[key] = self._earlier.pop(key)
        self._budget.clear(key)
        self._start(spec)

    @property
    def _has_foreign_coordinator(self) -> bool:
        """True if the coordinator need not report that the run is in use."""
        return self._implementations["coordinator", 0] != Implementations().of("coordinator", 0)

    def _measure(self) -> None:
        pids = [*self._processes, *helpers_of(self._processes), *self._watched]
        if self._memory_watch.look(pids, always_used=self._has_foreign_coordinator):
            self._nudge_coordinator()
        self._history.look()

    # ---- the end ---------------------------------------------------------------------------------------------
    def _shut_down(self) -> None:
        self._stopping = True
        self._idle_profile.end()
        if self._replacement is not None:
            answer(self._replacement.client, {"error": "the run is ending"})
        coordinator = [pid for pid, spec in self._processes.items() if spec.role == "coordinator"]
        self._leaving[self._lines["coordinator", 0]] = 1  # it is not started again: the run ends with it
        drain_s = DRAIN_S if self.failure is None else 0.0  # a failed run has nothing to finish
        for pids, number, timeout_s, can_be_skipped in (
            (coordinator, signal.SIGTERM, drain_s, True),
            (list(self._processes), signal.SIGTERM, TERMINATE_S, True),
            (list(self._processes), signal.SIGKILL, KILL_S, False),
        ):
            for pid in pids:
                if pid in self._processes:
                    os.kill(pid, number)
            deadline = time.monotonic() + (timeout_s if pids else 0.0)
            while self._must_wait_for(pids) and time.monotonic() < deadline and not (can_be_skipped and self._hasty):
                self._reap()
                time.sleep(0.002)
        self._history.keep()
        self._directory.remove()

    def _must_wait_for(self, signalled: list[int]) -> bool:
        """Return True while there are processes that should end now; the gateway ends only when it is signalled."""
        return any(spec.role != GATEWAY or pid in signalled for pid, spec in self._processes.items())
