"""Bare Debian 12 hosts in namespaces, with systemd as their init. Needs root.

A host's file system is an overlay over a cached root, which mmdebstrap makes once, with the packages that DiTFleet's own
need in apt's cache. So later runs need no network. The test program itself runs in namespaces (`enter`): its end, however
it comes, ends every host.
"""
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fleet import need, run, until

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ditfleet"
INCLUDE = "systemd,systemd-sysv,dbus,adduser,ca-certificates,iproute2"
BOOT = """
set -e
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$FOLDER/upper,workdir=$FOLDER/work" "$FOLDER/root"
cd "$FOLDER/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount --rbind /dev dev
for pair in $MOUNTS; do mkdir -p "./${pair#*=}"; mount --bind "${pair%=*}" "./${pair#*=}"; done
echo "$NAME" >etc/hostname
pivot_root . mnt
umount -l /mnt
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --unit=multi-user.target
"""


def bare_root(packages, *more):
    """Returns the cached root for these .deb files and further Debian packages; makes it with mmdebstrap if necessary."""
    depends = sorted({p for deb in packages for p in run("dpkg-deb", "-f", deb, "Depends").stdout.strip().split(", ")
                      if not p.startswith("ditfleet")} | set(more))
    key = hashlib.sha256(",".join([INCLUDE, *depends]).encode()).hexdigest()[:12]
    root = CACHE / f"debian-12-{key}"
    if root.exists():
        os.utime(root)
        return root
    need(shutil.which("mmdebstrap"), "mmdebstrap is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".partial-debian-", dir=CACHE))
    names = " ".join(p.split(" ")[0] for p in depends)
    made = run("mmdebstrap", "--quiet", "--variant=apt", f"--include={INCLUDE}", "--skip=cleanup/apt",
               f'--customize-hook=chroot "$1" apt-get -qq install -y --no-install-recommends --download-only {names}',
               "bookworm", work / "root", seconds=600)
    if made.returncode:
        shutil.rmtree(work, ignore_errors=True)
        need(False, f"mmdebstrap cannot make a Debian root; is the network up? {made.stderr[-300:]}")
    (work / "root/etc/apt/apt.conf.d/99test").write_text('APT::Get::Assume-Yes "true";\nAPT::Install-Recommends "false";\n')
    for old in CACHE.glob("debian-12-*"):
        if time.time() - old.stat().st_mtime > 7 * 86400:
            shutil.rmtree(old, ignore_errors=True)
    (work / "root").rename(root)
    os.utime(root)
    work.rmdir()
    return root


def enter():
    """Runs this program again in network, mount and process namespaces of its own."""
    if os.environ.get("DITFLEET_TEST_ENTERED"):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    need(os.geteuid() == 0, "needs root, for namespaces")
    need(shutil.which("ip"), "iproute2 is not installed")
    namespaces = ["unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child=KILL"]
    need(run(*namespaces, "true").returncode == 0, "namespaces are not permitted here")
    need(cgroups(), "no cgroup2 file system is mounted")
    os.environ["DITFLEET_TEST_ENTERED"] = "1"
    os.execvp("unshare", namespaces + [sys.executable, "-B", *sys.argv])


def cgroups():
    """Returns where cgroup2 is mounted, or None."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next((Path(m[1]) for m in mounts if m[2] == "cgroup2" and os.access(m[1], os.W_OK)), None)


class Host:
    """A host that has booted. `mounts` maps folders of this machine to folders of the host."""

    def __init__(self, name, root, mounts=None, address=None):
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix=f"ditfleet-{name}-"))
        self.upper = self.folder / "upper"
        for part in ("upper", "work", "root"):
            (self.folder / part).mkdir()
        self.cgroup = cgroups() / self.folder.name
        self.cgroup.mkdir()
        environment = {"PATH": os.environ["PATH"], "LOWER": str(root), "FOLDER": str(self.folder), "NAME": name,
                       "MOUNTS": " ".join(f"{there}={here}" for there, here in (mounts or {}).items())}
        self.log = open(self.folder / "boot.log", "w+")
        self.unshare = subprocess.Popen(
            ["sh", "-c", 'echo $$ >"$0/cgroup.procs"; exec "$@"', self.cgroup, "unshare", "--mount", "--pid", "--net", "--uts",
             "--ipc", "--cgroup", "--fork", "--kill-child=KILL", "sh", "-c", BOOT],
            env=environment, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        children = Path(f"/proc/{self.unshare.pid}/task/{self.unshare.pid}/children")
        try:
            self.init = until(lambda: children.read_text().split(), f"{name} starts", 10)[0]
            until(lambda: self.run("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded"),
                  f"{name} has booted", 60)
        except BaseException:
            print(Path(self.log.name).read_text(), file=sys.stderr)
            self.close()
            raise
        if address:
            self.connect(address)

    def connect(self, address):
        """Connects the host to the bridge of this test program, which has the address 10.9.0.254."""
        if run("ip", "link", "show", "fleet").returncode:
            for command in ("link add fleet type bridge", "address add 10.9.0.254/24 dev fleet", "link set fleet up"):
                subprocess.run(["ip", *command.split()], check=True)
        for command in (f"link add {self.name} type veth peer name eth0 netns {self.init}", f"link set {self.name} master fleet up"):
            subprocess.run(["ip", *command.split()], check=True)
        self.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def run(self, *argv, check=True, seconds=180, **options):
        """Runs a command on the host as root."""
        done = run("nsenter", "-t", self.init, "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w", "env", "-i",
                   "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8", *argv, seconds=seconds, **options)
        assert not check or done.returncode == 0, f"{self.name}: {argv} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done

    def shell(self, script, check=True, seconds=180):
        """Runs a script with sh on the host; `sudo` runs its command as it is. Ends at the first error."""
        return self.run("sh", "-ec", 'sudo() { "$@"; }\ncd /root\n' + script, check=check, seconds=seconds)

    def write(self, path, text):
        self.run("sh", "-c", f"cat >{path}", input=text, stdin=None)

    def journal(self, unit):
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit).stdout

    def close(self):
        self.unshare.kill()
        self.unshare.wait()
        self.log.close()
        until(lambda: "populated 0" in (self.cgroup / "cgroup.events").read_text(), f"the processes of {self.name} have ended", 10)
        for folder in sorted((f for f in self.cgroup.rglob("*") if f.is_dir()), reverse=True):
            folder.rmdir()
        self.cgroup.rmdir()
        shutil.rmtree(self.folder)
