"""A study that many processes share: leases, takeovers, crashes; and a real Slurm (HORNER_LONG).

The workers of one test are processes of this machine; some believe that they are on other machines (a PID namespace of their
own: others cannot see whether they live) or have a clock that is off by an hour."""

import getpass
import glob
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

HORNER = os.environ["HORNER"]
LONG = "HORNER_LONG" in os.environ
SIZE = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
TINY = {"model": "tiny", "device": "cpu", "threads": 1, "batch": 2, "length": 16, "evaluate-sequences": 2, "checkpoint-every": 50, "model-config": SIZE}
ENV = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
STARTED = []


def study_file(folder, steps, tasks=("copy",), **fields):
    path = folder / "study.json"
    path.write_text(json.dumps({"title": "Shared", "attention": ["softmax", "taylor1"], "settings": {**TINY, "steps": steps}, "tasks": list(tasks), **fields}))
    return path


def horner(*words, code=0, **more):
    done = subprocess.run([HORNER, *map(str, words)], capture_output=True, text=True, timeout=600, env=ENV, **more)
    assert done.returncode == code, (done.returncode, done.stdout + done.stderr)
    return done.stdout if code == 0 else done.stderr


def start(folder, *words, before=(), env=ENV):
    """A worker on folder/out; what it says goes to a file."""
    log = open(folder / f"said-{random.randrange(1 << 60)}", "w+")
    child = subprocess.Popen([*before, HORNER, "study", "study.json", "--out", "out", *map(str, words)], cwd=folder, stdout=subprocess.DEVNULL, stderr=log, env=env)
    child.said = lambda: Path(log.name).read_text()
    STARTED.append(child)
    return child


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    while STARTED:
        worker = STARTED.pop()
        if worker.poll() is None:
            send(freeze(worker), signal.SIGKILL)
            worker.wait()


def wait_until(true, seconds=120):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def family(pid):
    """A process and all below it."""
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid, *(p for b in below for p in family(int(b)))]


def send(pids, what):
    for pid in pids:
        try:
            os.kill(pid, what)
        except ProcessLookupError:
            pass


def freeze(worker):
    """Stops a worker and what it started, as a machine that does not answer."""
    before = []
    while before != (now := family(worker.pid)):
        send(now, signal.SIGSTOP)
        before = now
    return before


def leases(out):
    """The leases that are held: folder -> what it says."""
    found = {}
    for path in map(Path, glob.glob(f"{out}/*/*/*.try*/.lease")):
        try:
            lease = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        if lease["state"] == "running":
            found[path.parent] = lease
    return found


def steps(run):
    text = (run / "metrics.jsonl").read_text()
    return [s["step"] for s in map(json.loads, text[: text.rfind("\n") + 1].splitlines()) if "loss" in s]


def report(folder):
    """The bytes of the report. Speed and memory, which are the machine's, have a file of their own."""
    return [(folder / "out" / name).read_bytes() for name in ("report.json", "report.html") if (folder / "out" / name).exists()]


def serial(folder, grid):
    """The same study by one process."""
    folder.mkdir()
    shutil.copy(grid, folder / "study.json")
    horner("study", "study.json", "--out", "out", "--jobs", 1, cwd=folder)
    return report(folder)


def finished_once(folder, names, workers, last):
    out = folder / "out"
    assert sorted(str(p.parent.relative_to(out)) for p in out.rglob("result.json")) == sorted(names)
    assert not list(out.glob("*/*/*.try*")) and not list(out.rglob("*.part*"))
    for name in names:
        assert steps(out / name) == list(range(1, last + 1)), name
        assert sum(len(times_done(name, w.said())) for w in workers) <= 1, name


def times_done(name, said):
    return re.findall(rf"^{name}  .*done$", said, re.MULTILINE)


OFF_BY_AN_HOUR = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t c, struct timespec* t) {
  int (*real)(clockid_t, struct timespec*) = dlsym(RTLD_NEXT, "clock_gettime");
  const int r = real(c, t);
  if (c == CLOCK_REALTIME || c == CLOCK_REALTIME_COARSE) t->tv_sec += 3600;
  return r;
}
time_t time(time_t* out) { struct timespec t; clock_gettime(CLOCK_REALTIME, &t); if (out) *out = t.tv_sec; return t.tv_sec; }
int gettimeofday(struct timeval* v, void* z) { struct timespec t; (void)z; clock_gettime(CLOCK_REALTIME, &t); v->tv_sec = t.tv_sec, v->tv_usec = t.tv_nsec / 1000; return 0; }
"""


def machines(folder):
    """How to start a worker on this machine, on one with a wrong clock, and on another one."""
    (folder / "clock.c").write_text(OFF_BY_AN_HOUR)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "clock.so", folder / "clock.c"], check=True)
    wrong = {**ENV, "LD_PRELOAD": str(folder / "clock.so")}
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        assert not LONG, "the full test has workers in PID namespaces, and 'unshare --pid' is not allowed here; run it as root"
        apart = []
    return [{}, {"env": wrong}, {"before": apart}, {"before": apart, "env": wrong}]


def share(tmp_path, workers, killed, stopped, runs, last, lease):
    """Workers that die and stop at random moments while they share a study."""
    rng = random.Random(1)
    grid = study_file(tmp_path, last, attention=["softmax", "taylor{1..2}"], seeds=list(range(runs // 3)))
    names = horner("study", grid, "--out", tmp_path / "out", "--list").split()
    expected = serial(tmp_path / "serial", grid)
    out, kinds = tmp_path / "out", machines(tmp_path)
    all_workers = [start(tmp_path, "--jobs", 1, "--lease", lease, **kinds[i % len(kinds)]) for i in range(workers)]
    alive, frozen, taken, kinds_of_death = list(all_workers), [], 0, [0, 0]

    def done():
        return sum((out / n / "result.json").exists() for n in names)

    def progress():
        """The share of all steps that are done."""
        lines = 0
        for path in glob.glob(f"{out}/*/*/*/metrics.jsonl"):
            try:
                lines += Path(path).read_text().count('"loss"')
            except FileNotFoundError:
                pass
        return lines / (last * len(names))

    def holders():
        """The workers that train something now."""
        return [w for w in alive if any(b"train" in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0")[1:2] for p in family(w.pid)[1:] if Path(f"/proc/{p}").exists())]

    for k in range(killed + stopped):
        wait_until(lambda: leases(out) and progress() >= 0.8 * k / (killed + stopped))
        time.sleep(rng.random() * 0.2)
        worker = rng.choice(rng.random() < 0.8 and holders() or alive)
        alive.remove(worker)
        if k < stopped:
            frozen.append((worker, freeze(worker)))
        elif rng.random() < 0.5:  # the process; what it trains writes a checkpoint
            worker.kill()
            kinds_of_death[0] += 1
        else:  # the machine
            send(freeze(worker), signal.SIGKILL)
            kinds_of_death[1] += 1
        for path in list(leases(out))[:2]:  # no time of a file matters
            hour = time.time() + rng.choice((-3600, 3600))
            try:
                os.utime(path / ".lease", (hour, hour))
            except FileNotFoundError:
                pass
    wait_until(lambda: done() == len(names), 600)  # without those that are stopped: others have taken their runs
    for worker, pids in frozen:
        send(pids, signal.SIGCONT)
    for worker in alive + [w for w, _ in frozen]:
        assert worker.wait(timeout=300) == 0, worker.said()
    for worker in all_workers:
        worker.wait()
    finished_once(tmp_path, names, all_workers, last)
    assert report(tmp_path) == expected
    print(f"{workers} workers, {kinds_of_death} killed (process, machine), {stopped} stopped, {len(names)} runs")


def test_workers_die_and_stop_and_every_run_is_finished_once(tmp_path):
    share(tmp_path, workers=8, killed=3, stopped=1, runs=9, last=150, lease=2)


@pytest.mark.skipif(not LONG, reason="minutes: make test-long")
def test_a_hundred_workers_of_which_thirty_are_killed(tmp_path):
    share(tmp_path, workers=100, killed=30, stopped=10, runs=60, last=200, lease=10)


def test_a_stopped_worker_that_continues_gives_up(tmp_path):
    """Its run is taken over while it sleeps; awake, it notices, and writes nothing into the run of the other."""
    expected = serial(tmp_path / "serial", study_file(tmp_path, 1500, attention=["softmax"]))
    out = tmp_path / "out"
    first = start(tmp_path, "--lease", 2)
    wait_until(lambda: len(list(out.glob("copy/softmax/seed0.try1/checkpoint-0*"))) > 0)
    pids = freeze(first)
    before = steps(out / "copy/softmax/seed0.try1")[-1:]
    second = start(tmp_path, "--lease", 2)
    # It trains, whatever the first one has locked.
    wait_until(lambda: any(steps(p.parent)[-1:] > before for p in out.glob("copy/softmax/seed0.try2/metrics.jsonl")))
    assert [p.name for p in (out / "copy/softmax").iterdir()] == ["seed0.try2"]
    send(pids, signal.SIGCONT)
    assert first.wait(timeout=60) == 0 and second.wait(timeout=60) == 0, first.said() + second.said()
    finished_once(tmp_path, ["copy/softmax/seed0"], [first, second], 1500)
    assert "done" in second.said() and "done" not in first.said()
    assert report(tmp_path) == expected


def test_ctrl_c_releases_the_runs_at_once(tmp_path):
    study_file(tmp_path, 1_000_000, attention=["softmax"])
    first, out = start(tmp_path, "--lease", 3600), tmp_path / "out"
    wait_until(lambda: list(out.glob("copy/*/*/metrics.jsonl")))
    listed = horner("study", "study.json", "--out", "out", "--list", cwd=tmp_path)
    assert re.fullmatch(rf"copy/softmax/seed0  running on {socket.gethostname()}, process {first.pid}, heartbeat \S+ s ago\n", listed), listed
    first.send_signal(signal.SIGINT)
    assert first.wait() == 130
    assert first.said().endswith("resume: horner study study.json --out out --lease 3600\n")
    assert "interrupted" in horner("study", "study.json", "--out", "out", "--list", cwd=tmp_path)
    assert list(out.glob("copy/*/seed0.try1/checkpoint-*"))
    second = start(tmp_path, "--lease", 3600)
    wait_until(lambda: (out / "copy/softmax/seed0.try2/log.txt").exists() and "resuming from" in (out / "copy/softmax/seed0.try2/log.txt").read_text(), 20)
    send(family(second.pid), signal.SIGKILL)
    second.wait()
    third = start(tmp_path, "--lease", 3600)  # of a dead process of this machine it need not wait for the heartbeat
    wait_until(lambda: (out / "copy/softmax/seed0.try3").exists(), 20)
    third.send_signal(signal.SIGTERM)
    assert third.wait() == 143


def test_runs_are_spread_over_the_gpus(tmp_path):
    """Each sees one of those that the process sees, and they have equally many."""
    study_file(tmp_path, 1_000_000, attention=["softmax", "taylor{1..3}"])

    def seen(worker):
        out = []
        for pid in family(worker.pid)[1:]:
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if b"train" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:2]:
                    out.append([v.decode() for v in variables if v.startswith(b"CUDA_VISIBLE_DEVICES=")])
            except (FileNotFoundError, ProcessLookupError):
                pass
        return sorted(sum(out, []))

    for jobs, gpus, wanted in ((4, "4,GPU-7", ["4", "4", "GPU-7", "GPU-7"]), (2, "3", ["3", "3"])):
        worker = start(tmp_path, "--jobs", jobs, env={**ENV, "CUDA_VISIBLE_DEVICES": gpus})
        wait_until(lambda: seen(worker) == [f"CUDA_VISIBLE_DEVICES={gpu}" for gpu in wanted])
        worker.send_signal(signal.SIGINT)
        assert worker.wait() == 130


def test_three_crashes_are_a_failure(tmp_path):
    grid = study_file(tmp_path, 20, tasks=[{"task": "text", "settings": {"data": "missing.bin"}}, "copy"], attention=["softmax"])
    said = horner("study", grid, "--out", "out", code=1, cwd=tmp_path)
    assert said.count("to be tried again: ") == 2 and said.count("FAILED: ") == 1 and "1 of 2 runs failed 3 times" in said
    failed = tmp_path / "out/text/softmax/seed0.try3"
    assert "missing.bin" in (failed / "log.txt").read_text() and (tmp_path / "out/copy/softmax/seed0/result.json").exists()
    assert "text/softmax/seed0  failed: " in horner("study", grid, "--out", "out", "--list", cwd=tmp_path)
    assert "1 of 2 runs failed" in horner("study", grid, "--out", "out", code=1, cwd=tmp_path)
    assert failed.exists()  # it was not tried again
    (tmp_path / "missing.bin").write_bytes(bytes(20_000))
    horner("study", grid, "--out", "out", "--retry", cwd=tmp_path)
    assert (tmp_path / "out/text/softmax/seed0/result.json").exists()


def test_a_corrected_run_has_three_tries_again(tmp_path):
    study_file(tmp_path, 20, tasks=["text"], attention=["softmax"], settings={**TINY, "steps": 20, "data": "missing.bin"})
    horner("study", "study.json", "--out", "out", code=2, cwd=tmp_path)  # without any run there is no report
    (tmp_path / "there.bin").write_bytes(bytes(20_000))
    study_file(tmp_path, 20, tasks=["text"], attention=["softmax"], settings={**TINY, "steps": 20, "data": "there.bin"})
    horner("study", "study.json", "--out", "out", cwd=tmp_path)
    assert [p.name for p in (tmp_path / "out/text/softmax").iterdir()] == ["seed0"]


def test_a_run_that_earlier_versions_left_is_resumed(tmp_path):
    """In the folder of the run itself, without a lease."""
    study_file(tmp_path, 300, attention=["softmax"])
    first, run = start(tmp_path), tmp_path / "out/copy/softmax/seed0"
    wait_until(lambda: list(run.parent.glob("seed0.try1/checkpoint-0*")))
    first.send_signal(signal.SIGINT)
    first.wait()
    run.with_name("seed0.try1").rename(run)
    (run / ".lease").unlink()
    horner("study", "study.json", "--out", "out", cwd=tmp_path)
    assert steps(run) == list(range(1, 301)) and "resuming from" in (run / "log.txt").read_text()


def test_a_folder_has_one_study(tmp_path):
    """The next one may have other runs besides; another one is refused by its title, its name or its runs."""
    study_file(tmp_path, 4)
    words = ["study", "study.json", "--out", "out"]
    horner(*words, "--only", "*/softmax/*", cwd=tmp_path)
    horner(*words, "--only", "*/taylor1/*", cwd=tmp_path)
    os.rename(study_file(tmp_path, 4), tmp_path / "mine.json")
    for name, fields, said in (("study", {"title": "Other"}, "out holds the study 'Shared' (study), not 'Other' (study); choose another --out"),
                               ("mine", {}, "out holds the study 'Shared' (study), not 'Shared' (mine); choose"),
                               ("study", {"attention": ["l2"]}, ", and none of the study 'Shared' (study), whose first is copy/l2/seed0; choose")):  # fmt: skip
        study_file(tmp_path, 4, **fields)
        before = report(tmp_path)
        assert said in horner("study", f"{name}.json", "--out", "out", code=2, cwd=tmp_path)
        assert report(tmp_path) == before
    horner(*words, "--force", cwd=tmp_path)
    horner(*words, cwd=tmp_path)


def test_the_script_for_slurm(tmp_path):
    grid = study_file(tmp_path, 20)
    words = ["study", grid, "--out", "it's out", "--only", "*/softmax/*", "--slurm", "--dry-run", "--array", 4, "--time", "2:00:00",
             "--gpus", 1, "--cpus-per-task", 8, "--partition", "fast", "--slurm-args", "--mem=16G --account=mine", "--retry",
             "--minutes", 30, "--force", "--keep-weights"]  # fmt: skip
    script = horner(*words, cwd=tmp_path)
    for option in ("array=1-4", "time=2:00:00", "gpus=1", "cpus-per-task=8", "partition=fast", "mem=16G --account=mine", "requeue", "signal=B:USR1@60"):
        assert f"#SBATCH --{option}\n" in script
    assert r"--out 'it'\''s out' --only '*/softmax/*' --jobs 1 --lease 60 --minutes 30 --no-wait --keep-weights --retry --force &" in script and "scontrol requeue" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert not (tmp_path / "it's out").exists()
    assert "--jobs 4 --lease" in horner("study", grid, "--out", "x", "--slurm", "--dry-run", "--gpus", 4)  # a run for each
    assert "--array requires --slurm" in horner("study", grid, "--out", "x", "--array", 4, code=2)
    none = {**ENV, "PATH": str(tmp_path)}
    done = subprocess.run([HORNER, "study", grid, "--out", tmp_path / "out", "--slurm"], capture_output=True, text=True, env=none)
    assert done.returncode == 2 and "no 'sbatch' here: run this where jobs are submitted" in done.stderr


# A real Slurm: a controller and two nodes on this machine.

CONF = """ClusterName=test
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=2
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
NodeName=n1 NodeHostname={host} Port={one} CPUs=4
NodeName=n2 NodeHostname={host} Port={two} CPUs=4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(n):
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    if not LONG:
        pytest.skip("minutes: make test-long")
    for program in ("slurmctld", "slurmd", "munged", "sbatch"):
        if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin") is None:
            pytest.fail(f"no {program}: scripts/install-packages slurm")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "munge"):
        (folder / name).mkdir()
    for parent in (folder, *folder.parents):  # munged wants a path that all may enter
        if parent.is_relative_to(tmp_path_factory.getbasetemp().parent):
            parent.chmod(0o755)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    port, one, two = free_ports(3)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, host=socket.gethostname(), user=getpass.getuser(), port=port, one=one, two=two))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/usr/sbin")
    monkeypatch.setitem(ENV, "SLURM_CONF", str(conf))
    m = folder / "munge"
    daemons = [["munged", "-F", f"--key-file={key}", f"--socket={m}/socket", f"--pid-file={m}/pid", f"--log-file={m}/log", f"--seed-file={m}/seed"],
               ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]  # fmt: skip
    started = []
    try:
        for words in daemons:
            started.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(0.5)
        wait_until(lambda: slurm_says("sinfo", "-h", "-o", "%D %t") == "2 idle", 60)
        yield folder
        slurm_says("scancel", "--full", "-u", getpass.getuser())
        wait_until(lambda: slurm_says("squeue", "-h") == "", 60)
    finally:
        for daemon in reversed(started):
            daemon.terminate()
        for daemon in started:
            daemon.wait()


def slurm_says(*words):
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def steps_per_second(folder):
    (folder / "speed").mkdir()
    study_file(folder / "speed", 600, attention=["taylor2"])
    horner("study", "study.json", "--out", "out", cwd=folder / "speed")
    return json.loads((folder / "speed/out/copy/taylor2/seed0/result.json").read_text())["tokens_per_second"] / (TINY["batch"] * TINY["length"])


def test_an_array_job_is_queued_again_until_the_study_is_done(slurm, tmp_path):
    """Eight tasks with a limit of two minutes, of which Slurm gives them the first; a node is drained in the middle."""
    last = 300 * round(steps_per_second(tmp_path) * 180 / 12 / 300)  # three minutes of one core
    grid = study_file(tmp_path, last, attention=["softmax", "taylor{1..5}"], seeds=[0, 1])
    names = horner("study", grid, "--out", tmp_path / "out", "--list").split()
    expected = serial(tmp_path / "serial", grid)
    began = time.monotonic()
    said = horner("study", "study.json", "--out", "out", "--slurm", "--array", 8, "--time", 2, cwd=tmp_path)
    job = re.search(r"^job (\d+): 8 tasks for 12 of 12 runs; who runs what: horner study study.json --out out --list", said)[1]
    wait_until(lambda: len(leases(tmp_path / "out")) == 8, 60)
    listed = horner("study", "study.json", "--out", "out", "--list", cwd=tmp_path)
    assert len(re.findall(rf"  running on \S+, process \d+, job {job}_\d, heartbeat ", listed)) == 8, listed
    wait_until(lambda: list((tmp_path / "out").glob("*/*/*/checkpoint-0*")))
    subprocess.run(["scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test"], check=True)
    wait_until(lambda: slurm_says("squeue", "-h", "-w", "n1") == "", 300)  # its tasks are queued again, for the other node
    drained = time.monotonic() - began
    wait_until(lambda: slurm_says("squeue", "-h") == "", 900)
    took = time.monotonic() - began
    logs = "".join(p.read_text() for p in (tmp_path / "out/slurm").glob("*.log"))
    assert logs.count("interrupted; run the same command to resume") >= 4
    out = tmp_path / "out"
    shutil.move(out / "slurm", tmp_path / "slurm")
    finished_once(tmp_path, names, [], last)
    assert all(len(times_done(n, logs)) == 1 for n in names)
    assert report(tmp_path) == expected
    print(f"{took:.0f} s; node drained after {drained:.0f} s; {logs.count('interrupted;')} requeues")
