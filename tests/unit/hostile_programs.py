"""Programs that try to get out of the sandbox, to be paid for nothing, to end the training or to use up the machine.

A program that got something it must not have prints ESCAPED, or has changed its `World` (test_hostile_programs.py),
whose names it finds in its variables: the path of a `secret`, a `victim` process, sockets, what System V calls `ipc`.
"""

import platform

PRELUDE = """
import array, ctypes, errno, fcntl, gc, mmap, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
server, thread = os.getppid(), threading.get_native_id()
def raw(number, *given):
    return libc.syscall(*(ctypes.c_long(x) if isinstance(x, int) else x for x in (number, *given)))
def escaped(result=0):
    if result != -1:
        os.write(1, b"ESCAPED " + repr(result).encode()[:200] + b"\\n")
def refused(function, *given, **named):
    try:
        escaped(function(*given, **named))
    except (OSError, ValueError, MemoryError, AttributeError) as error:
        pass
def earlier(data):  # the earlier program's text has digits behind the word, which stands here backwards
    word = bytes(reversed(b'-tuollor-reilrae'))
    place = data.find(word)
    while place >= 0:
        if data[place + len(word):place + len(word) + 8].isdigit():
            return True
        place = data.find(word, place + 1)
    return False
def found_in_memory(low, high):
    inside, outside = os.pipe()
    for address in range(low & ~4095, high, 4096):
        if libc.write(outside, ctypes.c_void_p(address), 4096) == 4096 and earlier(os.read(inside, 4096)):
            return True
    return False
"""

# A call of the kernel by its number on x86_64, with arguments by which it would do something.
_CALLS = """
shmget 29 0, 4096, 0o1600
shmat 30 ipc[0], 0, 0
shmctl 31 ipc[0], 0, 0
shmdt 67 0
msgget 68 0, 0o1600
msgsnd 69 ipc[1], ctypes.create_string_buffer(struct.pack('=q', 1) + b'hello'), 5, 0
msgrcv 70 ipc[1], ctypes.create_string_buffer(64), 8, 0, 0o4000
msgctl 71 ipc[1], 0, 0
semget 64 0, 1, 0o1600
semop 65 ipc[2], ctypes.create_string_buffer(struct.pack('=Hhh', 0, 1, 0)), 1
semctl 66 ipc[2], 0, 0, 0
semtimedop 220 ipc[2], ctypes.create_string_buffer(struct.pack('=Hhh', 0, 1, 0)), 1, 0
sched_setparam 142 victim, ctypes.create_string_buffer(4)
sched_setscheduler 144 victim, 5, ctypes.create_string_buffer(4)
sched_setscheduler-batch-of-the-server 144 server, 3, ctypes.create_string_buffer(4)
sched_setaffinity 203 victim, 8, ctypes.create_string_buffer(struct.pack('=Q', 1))
sched_setattr 314 victim, ctypes.create_string_buffer(struct.pack('=IIQiIQQQ', 48, 3, 0, 5, 0, 0, 0, 0)), 0
setpriority 141 0, victim, 19
ioprio_set 251 1, victim, 3 << 13
prlimit64-of-another 302 victim, 0, ctypes.create_string_buffer(struct.pack('=QQ', 1, 1)), 0
prlimit64-of-itself 302 0, 0, ctypes.create_string_buffer(struct.pack('=qq', -1, -1)), 0
prlimit64-read-of-another 302 victim, 7, 0, ctypes.create_string_buffer(16)
setrlimit 160 0, ctypes.create_string_buffer(struct.pack('=qq', 5, 5))
kill 62 victim, 15
kill-stop 62 victim, 19
kill-the-server 62 server, 9
stop-the-server 62 server, 19
kill-group 62 0, 9
kill-the-trainer 62 trainer, 23
tkill 200 victim, 15
tgkill 234 victim, victim, 15
rt_sigqueueinfo 129 victim, 15, ctypes.create_string_buffer(struct.pack('=iii', 15, 0, -1) + bytes(116))
rt_tgsigqueueinfo 297 victim, victim, 15, ctypes.create_string_buffer(struct.pack('=iii', 15, 0, -1) + bytes(116))
pidfd_open 434 victim, 0
pidfd_open-server 434 server, 0
pidfd_getfd 438 3, 0, 0
ptrace-attach 101 16, victim, 0, 0
ptrace-seize 101 0x4206, server, 0, 0
ptrace-traceme 101 0, 0, 0, 0
process_vm_readv 310 server, ctypes.create_string_buffer(16), 1, ctypes.create_string_buffer(16), 1, 0
process_vm_writev 311 server, ctypes.create_string_buffer(16), 1, ctypes.create_string_buffer(16), 1, 0
kcmp 312 os.getpid(), os.getpid(), 0, 0, 1
migrate_pages 256 victim, 8, ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
move_pages 279 victim, 0, 0, 0, 0, 0
get_robust_list 274 server, ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
fork 57
vfork-clone 56 0x4111, 0, 0, 0, 0
clone 56 17, 0, 0, 0, 0
clone-parent 56 0x8011, 0, 0, 0, 0
clone-new-user 56 0x10000011, 0, 0, 0, 0
clone3 435 ctypes.create_string_buffer(struct.pack('=11Q', 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)), 88
unshare-user 272 0x10000000
unshare-files 272 0x400
setns 308 0, 0
setpgid 109 0, 0
setsid 112
setuid 105 os.getuid()
setresuid 117 -1, 0, -1
setgid 106 os.getgid()
setgroups 116 0, 0
capset 126 ctypes.create_string_buffer(struct.pack('=Ii', 0x20080522, 0)), ctypes.create_string_buffer(24)
prctl-outlive-the-server 157 1, 0, 0, 0, 0
prctl-dumpable 157 4, 0, 0, 0, 0
prctl-seccomp 157 22, 1, 0, 0, 0
seccomp 317 0, 0, 0
seccomp-listener 317 1, 8, 0
personality 135 0x0400000
modify_ldt 154 0, ctypes.create_string_buffer(16), 16
iopl 172 0
memfd_create 319 b'memory', 0
memfd_secret 447 0
userfaultfd 323 1
add_key 248 b'user', b'name', b'value', 5, -2
request_key 249 b'user', b'name', 0, -2
keyctl 250 0, -3, 1
mq_open 240 b'hostile', 0o102, 0o600, 0
mq_unlink 241 b'hostile'
io_setup 206 8, ctypes.create_string_buffer(8)
io_uring_setup 425 8, ctypes.create_string_buffer(120)
bpf 321 0, ctypes.create_string_buffer(128), 128
perf_event_open 298 ctypes.create_string_buffer(struct.pack('=II', 1, 128) + bytes(120)), 0, -1, -1, 0
sethostname 170 b'hostile', 7
setdomainname 171 b'hostile', 7
settimeofday 164 0, ctypes.create_string_buffer(8)
clock_settime 227 99, ctypes.create_string_buffer(16)
adjtimex 159 ctypes.create_string_buffer(208)
clock_adjtime 305 0, ctypes.create_string_buffer(208)
syslog 103 10, 0, 0
sync 162
syncfs 306 0
quotactl 179 0x80000700, 0, 0, 0
inotify_init1 294 0
fanotify_init 300 0x200, 0
fanotify_init-privileged 300 0, 0
flock 73 0, 2
fcntl-lease 72 1, 1024, 0
fcntl-notify 72 1, 1026, 0x80000002
fcntl-owner 72 1, 8, victim
fcntl-signal 72 1, 10, 9
fcntl-async 72 1, 4, 0x2000
fcntl-pipe-size 72 1, 1031, 1 << 20
fcntl-seal 72 3, 1033, 15
fcntl-write-lock 72 1, 6, ctypes.create_string_buffer(struct.pack('=hhiqqi', 1, 0, 0, 0, 0, 0) + bytes(8))
fcntl-owner-in-high-bits 72 1, (1 << 32) | 8, victim
ioctl-owner 16 1, 0x8901, ctypes.create_string_buffer(struct.pack('=i', 1))
ioctl-async 16 1, 0x5452, ctypes.create_string_buffer(struct.pack('=i', 1))
ioctl-terminal 16 0, 0x5412, b'x'
mincore 27 ctypes.c_void_p(id(raw) & ~4095), 4096, ctypes.create_string_buffer(1)
mlockall 151 4
swapoff 168 b'/nowhere'
mount 165 b'none', b'/tmp', b'tmpfs', 0, 0
umount2 166 b'/tmp', 2
pivot_root 155 b'/', b'/'
chroot 161 b'/'
chdir 80 folder.encode()
fsopen 430 b'tmpfs', 0
open_tree 428 -100, b'/', 1
move_mount 429 -100, b'/tmp', -100, b'/mnt', 0
mount_setattr 442 -100, b'/', 0, ctypes.create_string_buffer(32), 32
truncate 76 secret.encode(), 0
unlink 87 secret.encode()
unlinkat 263 -100, secret.encode(), 0
rename 82 secret.encode(), (secret + '2').encode()
renameat2 316 -100, secret.encode(), -100, (secret + '2').encode(), 0
mkdir 83 (folder + '/new').encode(), 0o700
rmdir 84 (folder + '/empty').encode()
link 86 secret.encode(), (folder + '/link').encode()
linkat 265 -100, secret.encode(), -100, (folder + '/link').encode(), 0
symlink 88 b'target', (folder + '/symlink').encode()
mknod 133 (folder + '/fifo').encode(), 0o10600, 0
creat 85 (folder + '/created').encode(), 0o600
chmod 90 secret.encode(), 0o777
fchmodat 268 -100, secret.encode(), 0o777
fchmodat2 452 -100, secret.encode(), 0o777, 0
chown 92 secret.encode(), os.getuid(), os.getgid()
utime 132 secret.encode(), ctypes.create_string_buffer(16)
utimensat 280 -100, secret.encode(), ctypes.create_string_buffer(32), 0
setxattr 188 secret.encode(), b'user.hostile', b'1', 1, 0
setxattrat 463 -100, secret.encode(), 0, b'user.hostile', struct_args(b'1'), 16
getxattrat 464 -100, secret.encode(), 0, b'user.kept', struct_args(bytes(8)), 16
listxattrat 465 -100, secret.encode(), 0, ctypes.create_string_buffer(64), 64
removexattrat 466 -100, secret.encode(), 0, b'user.kept'
removexattr 197 secret.encode(), b'user.kept'
open_tree_attr 467 -100, b'/', 1, 0, 0
file_getattr 468 -100, secret.encode(), ctypes.create_string_buffer(24), 24, 0
file_setattr 469 -100, secret.encode(), ctypes.create_string_buffer(struct.pack('=QIIII', 64, 0, 0, 0, 0)), 24, 0
name_to_handle_at 303 -100, secret.encode(), handle(), ctypes.create_string_buffer(8), 0
openat-write 257 -100, secret.encode(), 1, 0
openat-write-in-high-bits 257 -100, secret.encode(), (1 << 32) | 1, 0
openat-truncate 257 -100, secret.encode(), 0o1000, 0
openat-temporary 257 -100, folder.encode(), 0o20200002, 0o600
openat2 437 -100, secret.encode(), ctypes.create_string_buffer(24), 24
open-for-reading 2 secret.encode(), 0, 0
fallocate 285 1, 0, 0, 1 << 20
ftruncate 77 1, 1 << 20
copy_file_range 326 0, 0, 1, 0, 8, 0
splice 275 0, 0, 1, 0, 8, 0
vmsplice 278 1, 0, 0, 0
landlock_create_ruleset 444 0, 0, 1
landlock_restrict_self 446 4, 0
lsm_set_self_attr 460 100, ctypes.create_string_buffer(32), 32, 0
lsm_list_modules 461 ctypes.create_string_buffer(64), ctypes.create_string_buffer(struct.pack('=I', 64)), 0
mseal 462 ctypes.c_void_p(0x10000), 0, 0
cachestat 451 0, ctypes.create_string_buffer(16), ctypes.create_string_buffer(40), 0
listmount 458 ctypes.create_string_buffer(struct.pack('=IIQQ', 24, 0, (1 << 64) - 1, 0)), ctypes.create_string_buffer(800), 100, 0
process_madvise 440 3, 0, 0, 0, 0
process_mrelease 448 3, 0
set_mempolicy 238 0, 0, 0
timer_create 222 1, 0, ctypes.create_string_buffer(8)
signalfd4 289 -1, ctypes.create_string_buffer(8), 8, 0
sendmsg 46 1, 0, 0
socket-unix 41 1, 1, 0
socket-internet 41 2, 1, 0
socket-netlink 41 16, 3, 0
socket-packet 41 17, 3, 0
socketpair-datagrams 53 1, 2, 0, ctypes.create_string_buffer(8)
socketpair-seqpacket 53 1, 5, 0, ctypes.create_string_buffer(8)
bind 49 0, struct.pack('=H', 1) + bytes(1) + b'hostile', 10
"""

_HELPERS = """
def struct_args(value):
    buffer = ctypes.create_string_buffer(value)
    keep.append(buffer)
    return ctypes.create_string_buffer(struct.pack('=QII', ctypes.addressof(buffer), 1, 0))
def handle():
    return ctypes.create_string_buffer(struct.pack('=Ii', 128, 0) + bytes(128))
keep = []
"""

_KILL_BY_OWNER = """
a, b = {pair}
number = {target}
fcntl.fcntl(a, 8, number)
fcntl.fcntl(a, 10, {signal})
fcntl.fcntl(a, 4, fcntl.fcntl(a, 3) | 0x2000 | 0x800)
os.write(b, b'x')
time.sleep(0.1)
"""
_SOCKETS = "(lambda pair: (pair[0].detach(), pair[1].detach()))(socket.socketpair())"

_DATAGRAM = """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
refused(a.sendto, b'hello', {address})
"""

_BRACKETS = """
text = {start!r} + b'[' * (60 * 2**20) + b']' * {closing}
while text:
    try:
        text = text[os.write({file}, text):]
    except OSError:
        break
os._exit(0)
"""

_PROGRAMS = {
    # processes and signals
    "os.fork": "refused(os.fork)",
    "subprocess": "import subprocess\nrefused(subprocess.run, ['touch', folder + '/made'])",
    "os.system": "escaped(-1 if os.system('touch ' + folder + '/made') else 0)",
    "os.posix_spawn": "refused(os.posix_spawn, '/bin/touch', ['touch', folder + '/made'], {})",
    "os.execv": "refused(os.execv, '/bin/echo', ['echo', 'ESCAPED'])",
    "os.popen": "import warnings\nwarnings.simplefilter('ignore')\nrefused(lambda: os.popen('echo ESCAPED').read())",
    "multiprocessing": "import multiprocessing\nrefused(multiprocessing.Process(target=print).start)",
    "pty.fork": "import pty\nrefused(pty.fork)",
    "a fork bomb": "while True:\n    try:\n        os.fork()\n    except OSError:\n        break",
    "owner and signal of a socket: kill the victim": _KILL_BY_OWNER.format(pair=_SOCKETS, target="victim", signal=9),
    "owner and signal of a socket: stop the victim": _KILL_BY_OWNER.format(pair=_SOCKETS, target="victim", signal=19),
    "owner and signal of a socket: kill the server": _KILL_BY_OWNER.format(pair=_SOCKETS, target="server", signal=9),
    "owner and signal of a socket: stop the server": _KILL_BY_OWNER.format(pair=_SOCKETS, target="server", signal=19),
    "owner and signal of a pipe": _KILL_BY_OWNER.format(pair="os.pipe()", target="victim", signal=9),
    "owner by F_SETOWN_EX": """
a, b = os.pipe()
refused(fcntl.fcntl, a, 15, struct.pack('=ii', 1, victim))
""",
    "stop itself": "os.kill(os.getpid(), 19)",
    "abort": "os.abort()",
    "a signal to itself by raise": "signal.raise_signal(9)",
    "signals are ignored": "for number in range(1, 32):\n    try:\n        signal.signal(number, signal.SIG_IGN)\n    "
    "except OSError:\n        pass\nwhile True: pass",
    "an alarm whose handler starts anew": "signal.signal(14, lambda *_: signal.setitimer(0, 0.001))\n"
    "signal.setitimer(0, 0.001)\nwhile True: time.sleep(1)",
    # what other processes hold
    "memory of the trainer": "refused(lambda: open(f'/proc/{trainer}/mem', 'rb').read(1))",
    "maps of the server": "refused(lambda: open(f'/proc/{server}/maps').read())",
    "environment of the trainer": "refused(lambda: open(f'/proc/{trainer}/environ').read())",
    "command line of the trainer": "refused(lambda: open(f'/proc/{trainer}/cmdline').read())",
    "files of the trainer": "for number in range(200):\n    refused(os.open, f'/proc/{trainer}/fd/{number}', 0)",
    "files of the server": "for number in range(20):\n    refused(os.open, f'/proc/{server}/fd/{number}', 0)",
    "folder of the trainer": "refused(os.listdir, f'/proc/{trainer}/cwd/')",
    "links of the trainer": "refused(os.readlink, f'/proc/{trainer}/cwd')",
    "own memory by its file": "refused(lambda: open('/proc/self/mem', 'rb').read(1))",
    "own memory map": "refused(lambda: open('/proc/self/maps').read())",
    "who is killed when memory runs out": "refused(open, '/proc/self/oom_score_adj', 'w')",
    "descriptors that it was not given": """
for number in range(4, 1024):
    try:
        os.fstat(number)
        escaped(number)
    except OSError:
        pass
""",
    "messages to the caller": "for number in range(3, 64):\n    try:\n        socket.socket(fileno=number).send(b'x' * 5)\n"
    "        escaped()\n    except OSError:\n        pass",
    "an earlier program: strings that Python knows": """
for thing in gc.get_objects():
    for part in thing.values() if type(thing) is dict else thing if type(thing) in (list, tuple) else ():
        if type(part) is str and earlier(part.encode('utf-8', 'replace')):
            escaped()
""",
    "an earlier program: memory around objects": """
places = {id(thing) >> 20 for thing in gc.get_objects()}
for place in sorted({near for place in places for near in (place - 1, place, place + 1)}):
    if found_in_memory(place << 20, (place + 1) << 20):
        escaped()
        break
""",
    "an earlier program: the heap": """
libc.sbrk.restype = ctypes.c_void_p
end = libc.sbrk(0)
if found_in_memory(max(0, end - 64 * 2**20), end):
    escaped()
""",
    "an earlier program: the stack": """
libc.getenv.restype = ctypes.c_void_p
top = libc.getenv(b'PATH')
if found_in_memory(top - 2**20, top + 2**16):
    escaped()
""",
    "an earlier program: free memory": """
libc.malloc.restype = ctypes.c_void_p
for size in (100, 1000, 10_000, 100_000, 1_000_000):
    for _ in range(50):
        address = libc.malloc(size)
        if address and earlier(ctypes.string_at(address, size)):
            escaped()
""",
    "an earlier program: frames": """
frame = sys._getframe()
while frame:
    if earlier(repr([v for v in frame.f_locals.values() if type(v) in (str, list, tuple, dict)]).encode()):
        escaped()
    frame = frame.f_back
""",
    "an earlier program: the line cache": "import linecache\nif earlier(repr(linecache.cache).encode()):\n    escaped()",
    "environment variables": "if any('TOKEN' in name or 'SECRET' in value for name, value in os.environ.items()):\n"
    "    escaped()\nlibc.getenv.restype = ctypes.c_char_p\nif libc.getenv(b'HF_TOKEN'):\n    escaped()",
    # files
    "open the secret": "refused(lambda: open(secret).read())",
    "list the folder": "refused(os.listdir, folder)",
    "scan the folder": "refused(lambda: list(os.scandir(folder)))",
    "list the root": "refused(os.listdir, '/')",
    "by a descriptor of the folder": "refused(lambda: os.open('split.jsonl', 0, dir_fd=os.open(folder, os.O_PATH)))",
    "by a path descriptor": "held = os.open(secret, os.O_PATH)\nrefused(os.open, f'/proc/self/fd/{held}', 0)",
    "by the root of a process": "refused(os.open, f'/proc/self/root{secret}', 0)",
    "by the thread's folder": "refused(os.open, f'/proc/thread-self/root{secret}', 0)",
    "climbing out of a readable folder": "refused(os.open, os.__file__ + '/../../../../../../../../..' + secret, 0)",
    "out of /usr": "refused(os.open, '/usr/..' + secret, 0)",
    "as a module": "import importlib.util\nrefused(lambda: importlib.util.spec_from_file_location('m', secret).loader.get_data(secret))",
    "as a library": "try:\n    ctypes.CDLL(secret)\nexcept OSError as error:\n    if 'invalid ELF' in str(error):\n        escaped()",
    "as a zip file": "import zipfile\nrefused(zipfile.ZipFile, secret)",
    "as code": "import io\nrefused(io.open_code, secret)",
    "by runpy": "import runpy\nrefused(runpy.run_path, secret)",
    "by mmap": "refused(lambda: mmap.mmap(os.open(secret, 0), 0, access=mmap.ACCESS_READ)[:])",
    "by a thread": "thread = threading.Thread(target=refused, args=(open, secret))\nthread.start()\nthread.join()",
    "by shutil": "import shutil\nrefused(shutil.copyfile, secret, '/dev/null')",
    "by sqlite": "import sqlite3\ntry:\n    sqlite3.connect(secret).execute('select 1 from sqlite_master').fetchall()\n    escaped()\n"
    "except sqlite3.Error as error:\n    if 'not a database' in str(error):\n        escaped()",
    "by sendfile": "refused(lambda: os.sendfile(1, os.open(secret, 0), 0, 100))",
    "the passwords": "refused(lambda: open('/etc/passwd').read())",
    "the temporary folder": "refused(os.listdir, '/tmp')",
    "shared memory": "refused(os.listdir, '/dev/shm')",
    "the home": "refused(os.listdir, os.path.expanduser('~'))",
    "memory of the machine": "refused(os.open, '/dev/mem', 0)",
    "messages of the kernel": "refused(os.open, '/dev/kmsg', 0)",
    "the terminal": "refused(os.open, '/dev/tty', 0)",
    "the disk": "refused(os.open, '/dev/vda', 0)",
    "the system's settings": "refused(os.open, '/proc/sys/kernel/hostname', 0)",
    "write a file": "refused(open, folder + '/new', 'w')",
    "append to a file": "refused(open, secret, 'a')",
    "write in place": "refused(open, secret, 'r+')",
    "write a temporary file": "import tempfile\nrefused(tempfile.TemporaryFile)",
    "write where it is": "refused(open, 'new', 'w')",
    "write Python's files": "refused(open, os.__file__, 'r+')",
    "mode of a readable file": "refused(os.fchmod, os.open(os.__file__, 0), 0)",
    "times of a readable file": "refused(os.utime, os.open(os.__file__, 0), (0, 0))",
    "a lock on a readable file": "refused(fcntl.flock, os.open(os.__file__, 0), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "a lease on a readable file": "refused(fcntl.fcntl, os.open(os.__file__, 0), 1024, 0)",
    "a named shared memory": "from multiprocessing import shared_memory\nrefused(shared_memory.SharedMemory, None, True, 100)",
    # network
    "a connection": "refused(socket.create_connection, ('127.0.0.1', port), 2)",
    "a datagram over the network": "refused(lambda: socket.socket(2, 2).sendto(b'x', ('127.0.0.1', port)))",
    "a name": "refused(socket.getaddrinfo, 'example.org', 80)",
    "a page": "import urllib.request\nrefused(urllib.request.urlopen, f'http://127.0.0.1:{port}', timeout=2)",
    "a server": "refused(socket.create_server, ('127.0.0.1', 0))",
    "a datagram to a socket's file": _DATAGRAM.format(address="datagrams"),
    "a datagram to an abstract socket": _DATAGRAM.format(address="abstract"),
    "an address for a pair's socket": "a, b = socket.socketpair()\nrefused(a.connect, datagrams)",
    "a message with an address": "a, b = socket.socketpair()\nrefused(a.sendmsg, [b'x'], [], 0, datagrams)",
    "descriptors over a pair": "a, b = socket.socketpair()\nrefused(socket.send_fds, a, [b'x'], [0])",
    "an address for sending on a pair": "a, b = socket.socketpair()\nrefused(a.sendto, b'x', datagrams)",
    "an abstract name for a pair": "a, b = socket.socketpair()\nrefused(a.bind, '\\0hostile')",
    # taking the locks off
    "more time": "refused(resource.setrlimit, resource.RLIMIT_CPU, (-1, -1))",
    "more memory": "refused(resource.setrlimit, resource.RLIMIT_AS, (-1, -1))",
    "more files": "refused(resource.setrlimit, resource.RLIMIT_NOFILE, (4096, 4096))",
    "larger files": "refused(resource.setrlimit, resource.RLIMIT_FSIZE, (2**40, 2**40))",
    "capabilities": """
header, data = ctypes.create_string_buffer(struct.pack('=Ii', 0x20080522, 0)), ctypes.create_string_buffer(24)
libc.capget(header, data)
if any(struct.unpack('=6I', data.raw)[0::3]) :
    escaped(data.raw)
""",
    "x32": "raw(0x40000000 + 39)\nescaped()",
    "32 bits": """
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(bytes.fromhex('b814000000cd80c3'))  # getpid by the other door
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
escaped()
""",
    "a negative number": "raw(-2)\nos.write(1, b'going on')",
    # using the machine up
    "memory": "x = bytearray(10 * 2**30)",
    "memory by small things": "x = []\nwhile True:\n    x.append(bytearray(2**26))",
    "memory by maps": "x = []\nwhile True:\n    x.append(mmap.mmap(-1, 2**28))",
    "memory of exceptions": "x = 'a'\nwhile len(x) < 2**28:\n    x += x\nraise ValueError(x)",
    "time": "while True: pass",
    "time asleep": "time.sleep(1000)",
    "time in one call": "2 ** 10**9 % 7\n10 ** 10**9",
    "time in a pattern": "import re\nre.match('(a*)*b', 'a' * 40)",
    "time of threads": "for _ in range(20):\n    threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
    "time of a thread that is no daemon": "threading.Thread(target=time.sleep, args=(1000,)).start()",
    "time at exit": "import atexit\natexit.register(time.sleep, 1000)",
    "time in a finalizer": "class A:\n    def __del__(self):\n        time.sleep(1000)\nx = A()\ndel x",
    "time in the text of an error": "class A(Exception):\n    def __str__(self):\n        time.sleep(1000)\nraise A",
    "time in a trace": "sys.settrace(lambda *_: time.sleep(1000))\n(lambda: 0)()",
    "threads": "import _thread\nthreading.stack_size(32768)\ncount = 0\ntry:\n    while True:\n        _thread.start_new_thread(time.sleep, (1000,))\n"
    "        count += 1\nexcept RuntimeError:\n    escaped(count if count > 20000 else -1)",
    "descriptors": "x = []\ntry:\n    while True:\n        x.append(os.dup(0))\nexcept OSError:\n    pass\nescaped(len(x) if len(x) > 64 else -1)",
    "pipes full of data": "while True:\n    a, b = socket.socketpair()\n    a.setblocking(False)\n    a.detach(), b.detach()\n    os.write(a.fileno(), b'x')",
    "recursion": "def f(): f()\nf()",
    "recursion without a limit": "sys.setrecursionlimit(10**9)\ndef f(x): f([x])\nf(0)",
    "recursion in C": "sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    "output": "while True: os.write(1, b'x' * 2**20)",
    "output by printing": "while True: print('x' * 2**16)",
    "output of lines": "os.write(1, b' \\n' * (20 * 2**20))",
    "output far ahead": "os.pwrite(1, b'x', 60 * 2**20)",
    "output of numbers": "print(*['1'] * (10 * 2**20))",
    "output of digits": "os.write(1, b'9' * 10**6)",
    "output of a huge exponent": "print('1e999999999')",
    "output that is no number": "print('NaN')",
    "output of a number that signals": "print('sNaN')",
    "output that is not UTF-8": "os.write(1, bytes(range(128, 256)) * 1000)",
    "errors": "while True: os.write(2, b'x' * 2**20)",
    "input written to": "while True: os.write(0, b'x' * 2**20)",
    "brackets as the result": _BRACKETS.format(start=b"returned ", closing=0, file=3),
    "matched brackets as the result": _BRACKETS.format(start=b"returned ", closing="(60 * 2**20)", file=3),
    "brackets as the result of old": _BRACKETS.format(start=b'{"ended": "returned", "value": ', closing=0, file=3),
    "brackets as output": _BRACKETS.format(start=b"", closing=0, file=1),
    "a result of many small things": "os.write(3, b'returned [' + b'[],' * 10**7 + b'[]]')\nos._exit(0)",
    "a result of many digits": "os.write(3, b'returned ' + b'9' * 10**6)\nos._exit(0)",
    "a result that nests 5,000 deep": "os.write(3, b'returned ' + b'[' * 5000 + b']' * 5000)\nos._exit(0)",
    # forging how it ended
    "a result of its own": "os.write(3, b'returned 1.0')\nos._exit(0)",
    "a result of its own as of old": 'os.write(3, b\'{"ended": "returned", "value": 1.0, "output": "x"}\')\nos._exit(0)',
    "another kind of end": 'os.write(3, b\'{"ended": "lost", "error": "x"}\')\nos._exit(0)',
    "a key that no outcome has": 'os.write(3, b\'{"ended": "returned", "escaped": 1}\')\nos._exit(0)',
    "a result that is no JSON": "os.write(3, b'returned {')\nos._exit(0)",
    "a result in UTF-16": "os.write(3, 'returned 1'.encode('utf-16'))\nos._exit(0)",
    "an end without a result": "os._exit(0)",
    "another status": "os._exit(3)",
    "sys.exit": "sys.exit(0)",
    "no way to end": "os._exit = lambda status: None",
    "no way to write": "os.pwrite = lambda *given: None",
    "the text of results": "import json\njson.dumps = lambda value: '1.0'",
    "all descriptors closed": "os.closerange(0, 100)",
    "descriptors exchanged": "os.dup2(0, 3)\nos.dup2(1, 0)",
    "the result's descriptor closed": "os.close(3)",
    "standard output replaced": "class Out:\n    closed = False\n    def flush(self): raise KeyboardInterrupt\n    def write(self, text): pass\nsys.stdout = Out()",
    "standard output removed": "del sys.stdout",
    "an error with no text": "class A(BaseException):\n    def __str__(self): raise A\nraise A",
    "an error with the text of another": "raise type('UserError', (Exception,), {})('x')",
    "an exit whose code is odd": "raise SystemExit(object())",
    "a daemon that prints on": "def f():\n    while True: os.write(1, b'x')\nthreading.Thread(target=f, daemon=True).start()",
    "a frame of those who called": "frame = sys._getframe()\nwhile frame.f_back:\n    frame = frame.f_back\nframe.f_globals.clear()",
    "builtins removed": "import builtins\nfor name in list(vars(builtins)):\n    if name != 'delattr': delattr(builtins, name)",
    "modules removed": "sys.modules.clear()",
    "the collector": "gc.unfreeze()\ngc.collect()\ngc.disable()",
    "a fault": "ctypes.string_at(0)",
    "code that cannot be parsed": "exec('(' * 5000 + ')' * 5000)",
    "a null in the source": "exec('\\0')",
    "the recursion limit": "sys.setrecursionlimit(1)",
    "an interrupt": "import _thread\n_thread.interrupt_main()\ntime.sleep(1)",
    "the import system": "sys.meta_path.clear()\nsys.path_hooks.clear()",
}

PROGRAMS = dict(_PROGRAMS)
if platform.machine() == "x86_64":
    for line in _CALLS.strip().splitlines():
        name, number, *rest = line.split(" ", 2)
        arguments = "".join(f", {given}" for given in rest)
        PROGRAMS[f"call {number}, {name}"] = f"{_HELPERS}escaped(raw({number}{arguments}))"
    for number in (*range(470, 480), 511, 1000, 0x3FFFFFFF):
        PROGRAMS[f"call {number}, not known"] = (
            f"raw({number}, 0, 0, 0)\nif ctypes.get_errno() != errno.ENOSYS: escaped()"
        )

# Functions that must not be taken for one that returns the right value, which is SECRET or 12345.678.
FUNCTIONS = {
    "equal to all": "class A:\n    def __eq__(self, other): return True\n    def __float__(self): return 0.0\ndef f(x): return A()",
    "a text equal to all": "class A(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef f(x): return A('x')",
    "not a number": "def f(x): return float('nan')",
    "infinite": "def f(x): return float('inf')",
    "a text of infinity": "def f(x): return 'Infinity'",
    "a huge integer": "def f(x): return 10**4000",
    "an integer of many digits": "import sys\nsys.set_int_max_str_digits(0)\ndef f(x): return 10**100000",
    "true": "def f(x): return True",
    "none": "def f(x): return None",
    "an empty list": "def f(x): return []",
    "itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "deep": "def f(x):\n    a = []\n    for _ in range(900): a = [a]\n    return a",
    "long": "def f(x): return [0] * 10**7",
    "the result written": "import os\ndef f(x):\n    os.pwrite(3, b'returned \"SEC' + b'RET?\"', 0)\n    os._exit(0)",
    "the result of old written": 'import os\ndef f(x):\n    os.pwrite(3, b\'{"ended": "returned", "value": 1}\', 0)\n    os._exit(0)',
    "expected, by frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for name in ('expected', 'result', 'row', 'tests'):\n            if name in frame.f_locals: return frame.f_locals[name]\n        frame = frame.f_back",
    "its arguments": "def f(x): return x",
    "a generator": "def f(x):\n    yield 'SEC'",
    "no function": "g = 1",
    "a class": "class Solution:\n    def __getattr__(self, name): return lambda *given: object()",
    "a float that lies": "class A(float):\n    def __repr__(self): return '12345' '.6'\ndef f(x): return A(0)",
    "an integer that lies": "class A(int):\n    def __repr__(self): raise KeyboardInterrupt\ndef f(x): return A(0)",
    "never": "def f(x):\n    while True: pass",
    "code that ends": "import sys\nsys.exit(0)",
}
