"""Preparation: a Debian kernel and a small Debian userland from packages.

Nothing of the kernel is kept in the repository: packages are fetched through
apt into the cache folder and unpacked there.
"""
import hashlib
import json
import os
import re
import shutil
import subprocess
import time

from .common import CACHE, CURRENT, DEBS, OWN_SERIES, SERIES, Fail, locked, need_root, ok, run, say

GUEST_PACKAGES = """bash coreutils util-linux mount procps grep sed mawk
findutils kmod iproute2 iputils-ping python3 ethtool netbase hostname strace
tcpdump ibverbs-providers ibverbs-utils rdmacm-utils perftest python3-pyverbs
e2fsprogs fio nbd-client""".split()

# command needed on the host -> Debian package that has it
HOST_TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "ip": "iproute2",
    "tcpdump": "tcpdump",
    "depmod": "kmod",
    "busybox": "busybox-static",
    "mkfs.ext4": "e2fsprogs",
    "qemu-io": "qemu-utils",
    "nbdcopy": "libnbd-bin",
    "fio": "fio",
    "xz": "xz-utils",
    "dpkg-deb": "dpkg",
    "ldconfig": "libc-bin",
    "tar": "tar",
}
# suites of Debian's archive where other series are looked for: the first set that has the series gives its
# kernel and the compiler of its modules
ELSEWHERE = (("trixie", "trixie-backports"), ("sid",))
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
BOOT_MODULES = ["virtio_blk", "ext4", "crc32c_generic"]
# folders of modules no guest has hardware for
UNUSED_MODULES = ["kernel/" + d for d in (
    "sound", "drivers/gpu", "drivers/media", "drivers/net/wireless", "drivers/scsi", "drivers/usb",
    "drivers/staging", "drivers/net/ethernet", "drivers/iio", "drivers/hid", "drivers/input",
    "drivers/mtd")]


def apt_get(args, timeout=900, cwd=None):
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive", LC_ALL="C")
    return run(["apt-get", "-q", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=120",
                "-o", "APT::Sandbox::User=root"] + args, timeout=timeout, env=env, cwd=cwd)


def apt_apart(suites):
    """-> apt's options for these suites of this machine's archive; its own lists and packages stay as they are."""
    if not suites:
        return []
    at = os.path.join(CACHE, "apt-" + suites[-1])
    for d in ("lists/partial", "cache/archives/partial"):
        os.makedirs(os.path.join(at, d), exist_ok=True)
    with open("/etc/os-release") as f:
        mine = re.search(r'^VERSION_CODENAME="?(\w+)', f.read(), re.M)
    known = run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)",
                 "Created-By: Packages"]).split("\n")
    uris = [w[0] for w in map(str.split, known) if mine and w[1:] == [mine.group(1), "main"]]
    if not uris:
        raise Fail("apt has no archive of this machine's release to look for other suites in")
    with open(at + "/sources.list", "w") as f:
        for suite in suites:
            f.write("deb [signed-by=%s] %s %s main\n" % (KEYS, uris[0], suite))
    open(at + "/status", "w").close()
    return ["-o", "Dir::Etc::SourceList=%s/sources.list" % at, "-o", "Dir::Etc::SourceParts=/dev/null",
            "-o", "Dir::Etc::Preferences=/dev/null", "-o", "Dir::Etc::PreferencesParts=/dev/null",
            "-o", "Dir::State::Lists=%s/lists" % at, "-o", "Dir::State::status=%s/status" % at,
            "-o", "Dir::Cache=%s/cache" % at]


def apt_show(pkgs, apt=()):
    """-> list of dicts, one per stanza that apt knows for these packages."""
    r = subprocess.run(["apt-cache", *apt, "show"] + pkgs, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120)
    out = []
    for stanza in r.stdout.decode(errors="replace").split("\n\n"):
        d = {}
        for line in stanza.splitlines():
            if line[:1] not in (" ", "") and ": " in line:
                k, v = line.split(": ", 1)
                d[k] = v
        if d.get("Package"):
            out.append(d)
    return out


def deb_newer(a, b):
    return subprocess.run(["dpkg", "--compare-versions", a, "gt", b]).returncode == 0


def discover(want=None, apt=()):
    """Newest linux-image package of the series that apt knows."""
    r = subprocess.run(["apt-cache", *apt, "search", "--names-only",
                        r"^linux-image-%s\.[0-9]+.*-amd64$" % re.escape(SERIES)],
                       stdout=subprocess.PIPE, timeout=120).stdout.decode()
    kvers = [w.split()[0][len("linux-image-"):] for w in r.splitlines()]
    kvers = [k for k in kvers if re.match(r"^[0-9.]+\+(deb|bpo)[0-9]+(\+[0-9]+)?-amd64$", k)]
    if want:
        kvers = [k for k in kvers if k == want]
    if not kvers:
        return None
    best = None
    for d in apt_show(["linux-image-" + k for k in kvers], apt):
        if best is None or deb_newer(d["Version"], best["version"]):
            best = {"kver": d["Package"][len("linux-image-"):], "version": d["Version"], "debs": [d]}
    if best:
        # of newer ones this package is empty, and its parts have packages of their own
        parts = ["linux-%s-%s" % (x, best["kver"]) for x in ("base", "binary", "modules")]
        best["debs"] += [d for d in apt_show(parts, apt) if d["Version"] == best["version"]]
    return best


def discover_elsewhere(want=None, refresh=False):
    """Such a kernel out of the first newer suites that have one."""
    for suites in ELSEWHERE:
        apt = apt_apart(suites)
        k = None if refresh else discover(want, apt)
        if not k:
            say("getting the package lists of " + " and ".join(suites))
            apt_get(apt + ["update"])
            k = discover(want, apt)
        if k:
            return dict(k, suites=suites)
    return None


def fetch_deb(d, apt=()):
    """Download one package version into the cache unless it is there already."""
    name = "%s_%s_%s.deb" % (d["Package"], d["Version"].replace(":", "%3a"), d["Architecture"])
    path = os.path.join(DEBS, name)
    want = d.get("SHA256")

    def good():
        if not os.path.exists(path):
            return False
        if not want:
            return True
        h = hashlib.sha256()
        with open(path, "rb") as f:
            for chunk in iter(lambda: f.read(1 << 20), b""):
                h.update(chunk)
        return h.hexdigest() == want
    if not good():
        if os.path.exists(path):
            os.unlink(path)
        say("downloading %s %s" % (d["Package"], d["Version"]))
        apt_get([*apt, "download", "%s=%s" % (d["Package"], d["Version"])], cwd=DEBS)
        if not good():
            raise Fail("apt-get download did not leave a good %s" % name)
    return path


def deb_extract(deb, dest, members=None, exclude=()):
    """Unpack a package's files below dest, following the merged-/usr links."""
    os.makedirs(dest, exist_ok=True)
    p = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE)
    argv = ["tar", "-x", "-C", dest, "--keep-directory-symlink", "--no-same-owner"]
    argv += ["--exclude=" + e for e in exclude] + (members or [])
    t = subprocess.run(argv, stdin=p.stdout, stderr=subprocess.PIPE, timeout=600)
    p.stdout.close()
    p.wait()
    if t.returncode:
        raise Fail("unpacking %s: %s" % (deb, t.stderr.decode(errors="replace")[-800:]))


def host_tools():
    missing = sorted({pkg for tool, pkg in HOST_TOOLS.items() if not shutil.which(tool)})
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise Fail("missing on this host, and no apt-get to install them: " + " ".join(missing))
    need_root()
    say("installing " + " ".join(missing))
    try:
        apt_get(["install", "-y", "--no-install-recommends"] + missing)
    except Fail:
        apt_get(["update"])
        apt_get(["install", "-y", "--no-install-recommends"] + missing)


def merged_usr(root):
    """An empty root folder whose /bin, /lib, ... are links into /usr."""
    os.makedirs(root + "/usr")
    for d in ("bin", "sbin", "lib", "lib64", "lib32"):
        os.makedirs("%s/usr/%s" % (root, d))
        os.symlink("usr/" + d, root + "/" + d)


def closure(apt, pkgs):
    """Download packages and all they depend on, as if nothing were installed. -> paths of their files"""
    sel = [*apt, "-o", "Dir::Cache::archives=" + DEBS + "/", "-o", "Debug::NoLocking=1",
           "--no-install-recommends", "-y"]
    os.makedirs(DEBS + "/partial", exist_ok=True)
    apt_get(sel + ["-d", "install"] + pkgs)
    all_debs = [f for f in os.listdir(DEBS) if f.endswith(".deb")]
    want = re.findall(r"^Inst (\S+) \((\S+) ", apt_get(sel + ["-s", "install"] + pkgs), re.M)
    paths = []
    for pkg, ver in want:
        v = ver.replace(":", "%3a")
        hit = [f for f in all_debs if f.startswith("%s_%s_" % (pkg, v))]
        if not hit:
            raise Fail("apt-get left no package file for %s %s" % (pkg, ver))
        paths.append(os.path.join(DEBS, hit[0]))
    return paths


def prep_kernel(k):
    """Unpack the kernel image and its modules."""
    kver = k["kver"]
    base = os.path.join(CACHE, "k", kver)
    stamp = os.path.join(base, "ok-" + k["version"].replace("~", "_"))
    if os.path.exists(stamp):
        return base
    shutil.rmtree(base, ignore_errors=True)
    os.makedirs(base)
    t0 = time.monotonic()
    apt = apt_apart(k.get("suites"))
    if apt:
        merged_usr(base + "/image")
    for d in k["debs"]:
        deb_extract(fetch_deb(d, apt), base + "/image")
    for extra in UNUSED_MODULES:
        shutil.rmtree("%s/image/lib/modules/%s/%s" % (base, kver, extra), ignore_errors=True)
    run(["depmod", "-b", base + "/image", kver])
    open(stamp, "w").close()
    say("kernel %s ready in %.0f s" % (kver, time.monotonic() - t0))
    return base


def prep_initrd(base, kver):
    """Boot modules (decompressed) for the initramfs, in load order."""
    mods = base + "/boot-modules"
    root = "%s/image/lib/modules/%s" % (base, kver)
    if os.path.exists(mods + "/order"):
        return
    shutil.rmtree(mods, ignore_errors=True)
    os.makedirs(mods)
    deps = {}
    with open(root + "/modules.dep") as f:
        for line in f:
            mod, _, rest = line.partition(":")
            deps[mod] = rest.split()
    by_name = {re.sub(r"\.ko.*$", "", os.path.basename(m)).replace("-", "_"): m for m in deps}
    with open(root + "/modules.builtin") as f:
        builtin = {re.sub(r"\.ko$", "", os.path.basename(x.strip())).replace("-", "_") for x in f}
    order = []
    for name in BOOT_MODULES + ["crc32c"]:
        if name in builtin or name not in by_name:
            continue
        # modules.dep lists what a module needs with the deepest last
        for m in list(reversed(deps[by_name[name]])) + [by_name[name]]:
            if m not in order:
                order.append(m)
    with open(mods + "/order.tmp", "w") as f:
        for m in order:
            dst = re.sub(r"\.(xz|zst|gz)$", "", os.path.basename(m))
            if m.endswith(".xz"):
                with open(os.path.join(mods, dst), "wb") as o:
                    subprocess.run(["xz", "-dc", os.path.join(root, m)], stdout=o, check=True)
            elif m.endswith(".ko"):
                shutil.copy(os.path.join(root, m), mods)
            else:
                raise Fail("cannot decompress %s" % m)
            f.write(dst + "\n")
    os.rename(mods + "/order.tmp", mods + "/order")


def root_path(kver):
    key = hashlib.sha256(("7 " + kver + " ".join(sorted(GUEST_PACKAGES))).encode()).hexdigest()[:12]
    return os.path.join(CACHE, "root-%s-%s.ext4" % (kver, key))


def prep_root(base, kver):
    """The guest's root disk: Debian userland plus the kernel's modules."""
    img = root_path(kver)
    if os.path.exists(img):
        return img
    t0 = time.monotonic()
    empty = os.path.join(CACHE, "empty-status")
    open(empty, "w").close()
    say("downloading the guest's userland")
    debs = closure(["-o", "Dir::State::status=" + empty], GUEST_PACKAGES)
    root = os.path.join(CACHE, "root.tmp")
    shutil.rmtree(root, ignore_errors=True)
    merged_usr(root)
    say("unpacking %d packages" % len(debs))
    skip = ["./usr/share/doc/*", "./usr/share/man/*", "./usr/share/locale/*",
            "./usr/share/info/*", "./usr/share/icu/*"]
    for deb in debs:
        deb_extract(deb, root, exclude=skip)
    for d in ("proc", "sys", "dev", "run", "tmp", "root", "mnt", "host", "lab", "var/tmp",
              "var/log", "etc/modprobe.d", "etc/rdma"):
        os.makedirs(os.path.join(root, d), exist_ok=True)
    files = {
        "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:n:/:/bin/false\n",
        "etc/group": "root:x:0:\nnogroup:x:65534:\ntty:x:5:\n",
        "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
        "etc/fstab": "",
    }
    for p, text in files.items():
        with open(os.path.join(root, p), "w") as f:
            f.write(text)
    for link, to in (("usr/bin/awk", "mawk"), ("usr/bin/sh", "dash")):
        p = os.path.join(root, link)
        if not os.path.lexists(p) and os.path.exists(os.path.join(root, "usr/bin", to)):
            os.symlink(to, p)
    if not os.path.lexists(root + "/usr/bin/sh"):
        os.symlink("bash", root + "/usr/bin/sh")
    run(["cp", "-a", "%s/image/lib/modules" % base, root + "/usr/lib/modules"])
    run(["depmod", "-b", root, kver])
    run(["ldconfig", "-r", root])
    # the packages' own install scripts would have compiled these
    ok(["chroot", root, "/usr/bin/python3", "-m", "compileall", "-q", "/usr/lib/python3",
        "/usr/lib/" + next((d for d in os.listdir(root + "/usr/lib")
                            if re.match(r"python3\.\d+$", d)), "python3")], timeout=300)
    say("making the root disk")
    used = int(run(["du", "-sm", root]).split()[0])
    tmp = img + ".tmp"
    with open(tmp, "wb") as f:
        f.truncate((used + 400) << 20)
    run(["mkfs.ext4", "-q", "-F", "-L", "labroot", "-O", "^metadata_csum", "-m", "0",
         "-d", root, tmp], timeout=300)
    os.rename(tmp, img)
    for f in os.listdir(CACHE):
        if f.startswith("root-%s-" % kver) and os.path.join(CACHE, f) != img:
            os.unlink(os.path.join(CACHE, f))
    shutil.rmtree(root)
    say("root disk ready in %.0f s (%d MiB used)" % (time.monotonic() - t0, used))
    return img


def prepare(refresh=False, kver=None, quiet=False):
    os.makedirs(DEBS, exist_ok=True)
    lock = locked(os.path.join(CACHE, "prepare.lock"), "prepare", 1800)
    try:
        host_tools()
        if os.path.exists(CURRENT) and not refresh and not kver:
            with open(CURRENT) as f:
                c = json.load(f)
            if all(os.path.exists(c[k]) for k in ("vmlinuz", "root", "mods")) \
                    and c["root"] == root_path(c["kver"]):
                if not quiet:
                    say("ready: %s (package version %s)" % (c["kver"], c["version"]))
                return c
        if not shutil.which("apt-get"):
            raise Fail("prepare needs a Debian host (apt-get)")
        if SERIES != OWN_SERIES:
            k = discover_elsewhere(kver, refresh)
        else:
            k = None if refresh else discover(kver)
            if not k:
                say("refreshing the package lists")
                apt_get(["update"])
                k = discover(kver)
        if not k:
            raise Fail("apt knows no linux-image package of %s%s" % (SERIES, ", version " + kver if kver else ""))
        say("using %s (package version %s)" % (k["kver"], k["version"]))
        base = prep_kernel(k)
        prep_initrd(base, k["kver"])
        img = prep_root(base, k["kver"])
        vmlinuz = ["%s/image/boot/vmlinuz-%s" % (base, k["kver"]),
                   "%s/image/usr/lib/modules/%s/vmlinuz" % (base, k["kver"])]
        c = {"kver": k["kver"], "version": k["version"], "root": img, "suites": k.get("suites"),
             "vmlinuz": next((p for p in vmlinuz if os.path.exists(p)), vmlinuz[0]),
             "mods": base + "/boot-modules"}
        with open(CURRENT + ".tmp", "w") as f:
            json.dump(c, f, indent=1)
        os.rename(CURRENT + ".tmp", CURRENT)
        return c
    finally:
        lock.close()
