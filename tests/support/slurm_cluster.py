"""A Slurm cluster for tests: real daemons, each in a network namespace, with stand-in GPUs.

One namespace is the login node, with the controller; the others are nodes. Needs root and Debian's
packages slurm-wlm and munge; where they are missing, tests that use it are skipped.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import NamespaceHost, make_hosts

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "nsenter", "unshare")
SOURCES = Path(__file__).parents[2] / "src"
NUM_GPUS = 2
NUM_CPUS = 8
_OWN = ("SLURM", "SBATCH", "UNISONO", "XLA_", "KERAS_", "CUDA_", "TF_CONFIG")
_CONFIGURATION = """\
ClusterName=stage
SlurmctldHost=login({login})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdTimeout=8
KillWait=4
OverTimeLimit=0
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60
"""


class Cluster:
    """The cluster, seen from its login node."""

    def __init__(self, folder: Path, login: NamespaceHost, nodes: list[NamespaceHost]) -> None:
        self.folder = folder
        self.login = login
        self.nodes = nodes
        self.num_nodes = len(nodes)

    def start(self) -> None:
        (self.folder / "state").mkdir()
        names = [f"n{i}" for i in range(1, self.num_nodes + 1)]
        self._configure(names)
        self._keep_time()
        self._daemon(self.login, "login", f"slurmctld -i -f {self.folder}/slurm.conf")
        for name, host in zip(names, self.nodes, strict=True):
            self._daemon(host, name, f"slurmd -N {name} -f {self.folder}/slurm.conf")
        self.wait_for(lambda: self._num_idle() == self.num_nodes, 60)

    def stop(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.call("scancel", "-u", "root")
            self.wait_for(lambda: not self.call("squeue", "-h"), 15)
        for path in self.folder.glob("*.pid"):
            _end(int(path.read_text()))

    def call(self, *words: object, check: bool = True, **more: object) -> str:
        """What a command on the login node prints."""
        done = self.run(*words, **more)
        if check and done.returncode:
            raise AssertionError(f"{words}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def run(
        self, *words: object, cwd: Path | None = None, timeout: float = 100, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._prefix(self.login), *map(str, words)],
            env=self.environment() | env,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    def unisono(self, *words: object, **more: object) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "unisono", *words, **more)

    def start_process(self, *words: object, cwd: Path, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._prefix(self.login), *map(str, words)],
            env=self.environment() | env,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
        return kept | {
            "SLURM_CONF": f"{self.folder}/slurm.conf",
            "XDG_STATE_HOME": f"{self.folder}/records",
            "HOME": str(self.folder),
            "PYTHONPATH": str(SOURCES),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }

    def state(self, job: object) -> str:
        return self.call("squeue", "-h", "-t", "all", "-j", job, "-o", "%T", check=False)

    def wait_for_state(self, job: object, *states: str, seconds: float = 60) -> str:
        self.wait_for(lambda: self.state(job) in states, seconds, lambda: self.state(job))
        return self.state(job)

    def wait_for(self, is_so, seconds: float, describe=lambda: "") -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"not within {seconds} s: {describe()}"
            time.sleep(0.2)

    def kill_node(self, number: int) -> None:
        """As if its power were cut: the daemon, and everything that it started."""
        name = f"n{number}"
        host = self.nodes[number - 1]
        for pid in _pids_of(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        (self.folder / f"slurmd.{name}.pid").unlink()

    def revive_node(self, number: int) -> None:
        name = f"n{number}"
        self._daemon(self.nodes[number - 1], name, f"slurmd -N {name} -f {self.folder}/slurm.conf")
        self.wait_for(lambda: self._num_idle() == self.num_nodes, 60)

    def _num_idle(self) -> int:
        found = self.call("sinfo", "-h", "-N", "-p", "main", "-t", "idle", check=False)
        return len(found.splitlines())

    def _configure(self, names: list[str]) -> None:
        lines = [
            f"NodeName={name} NodeHostname={name} NodeAddr={host.address} CPUs={NUM_CPUS} "
            f"RealMemory=4000 Gres=gpu:{NUM_GPUS} State=UNKNOWN"
            for name, host in zip(names, self.nodes, strict=True)
        ]
        text = _CONFIGURATION.format(
            login=self.login.address, folder=self.folder, nodes="\n".join(lines)
        )
        (self.folder / "slurm.conf").write_text(text)
        devices = [self.folder / f"nvidia{i}" for i in range(NUM_GPUS)]
        for device in devices:
            os.mknod(device, 0o600 | 0o020000, os.makedev(1, 3))
        files = f"{self.folder}/nvidia[0-{NUM_GPUS - 1}]"
        gres = f"AutoDetect=off\nNodeName=n[1-{self.num_nodes}] Name=gpu File={files}\n"
        (self.folder / "gres.conf").write_text(gres)
        hosts = {"127.0.0.1": "localhost", self.login.address: "login"}
        hosts |= {host.address: name for name, host in zip(names, self.nodes, strict=True)}
        (self.folder / "hosts").write_text("".join(f"{a} {n}\n" for a, n in hosts.items()))

    def _keep_time(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        words = ["munged", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket"]
        words += [f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log"]
        words += [f"--seed-file={self.folder}/munge.seed", "--num-threads=2"]
        subprocess.run(words, check=True, capture_output=True)

    def _daemon(self, host: NamespaceHost, name: str, command: str) -> None:
        """Start one with names of its own for the hosts; it goes to the background by itself."""
        setup = f"mount --bind {self.folder}/hosts /etc/hosts; hostname {name}; exec {command}"
        words = [*self._prefix(host), "unshare", "--uts", "--mount", "sh", "-c", setup]
        subprocess.run(words, check=True, env=self.environment(), stdin=subprocess.DEVNULL)

    def _prefix(self, host: NamespaceHost) -> list[str]:
        return [str(shutil.which("nsenter")), f"--net=/run/netns/{host.namespace}"]


@contextlib.contextmanager
def make_cluster(folder: Path, num_nodes: int) -> Iterator[Cluster]:
    """A cluster that has come up; skips the test where none can be made."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"a Slurm cluster needs {', '.join(missing)} (Debian: slurm-wlm, munge)")
    with make_hosts(num_nodes + 1) as (login, *nodes):
        cluster = Cluster(folder, login, nodes)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def _pids_of(host: NamespaceHost) -> list[int]:
    words = ["ip", "netns", "pids", host.namespace]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in found.split()]


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        for _ in range(50):
            time.sleep(0.1)
            os.kill(pid, 0)
        os.kill(pid, signal.SIGKILL)
