/* The number-th change on disk below a folder fails, is torn, or ends the process: preloaded into a Python process and
   armed by `faults_arm` in a copy of it. Counts write, pwrite, fsync, fdatasync, rename, mkdir and creating open. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static long left = -1;
static long *seen = 0; /* shared with the process that made this one, which reads it when this one has ended */
static int mode = 0; /* 0: ENOSPC once; 1: ENOSPC from then on; 2: half of a write, then the process ends */
static char prefix[4096] = "";

void faults_ready(void) { /* in a process that makes copies of itself, each such process with a page of its own */
    static pid_t owner = 0;
    if (owner != getpid()) seen = mmap(0, sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    owner = getpid(), *seen = 0;
}
void faults_arm(long number, int how, const char *folder) { /* in a copy; a negative number: only count */
    left = number, mode = how;
    strncpy(prefix, folder, sizeof prefix - 1);
}
long faults_seen(void) { return *seen; }

static int below(const char *path) { return prefix[0] && path && strncmp(path, prefix, strlen(prefix)) == 0; }
static int file_below(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return below(path);
}
static int due(void) { /* is this change the one that fails? */
    ++*seen;
    return left >= 0 && (*seen == left + 1 || (mode == 1 && *seen > left));
}
#define REAL(type, name, ...) type (*real)(__VA_ARGS__) = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define FAIL do { if (mode == 2) _exit(9); errno = ENOSPC; return -1; } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (fd > 2 && file_below(fd) && due()) {
        if (mode == 2 && size > 1) real(fd, data, size / 2);
        FAIL;
    }
    return real(fd, data, size);
}
static ssize_t pwrite_any(const char *name, int fd, const void *data, size_t size, off_t at) {
    REAL(ssize_t, name, int, const void *, size_t, off_t);
    if (file_below(fd) && due()) {
        if (mode == 2 && size > 1) real(fd, data, size / 2, at);
        FAIL;
    }
    return real(fd, data, size, at);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite_any("pwrite", fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return pwrite_any("pwrite64", fd, data, size, at); }
int fsync(int fd) {
    REAL(int, "fsync", int);
    if (file_below(fd) && due()) FAIL;
    return real(fd);
}
int fdatasync(int fd) {
    REAL(int, "fdatasync", int);
    if (file_below(fd) && due()) FAIL;
    return real(fd);
}
int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    if (below(to) && due()) FAIL;
    return real(from, to);
}
int renameat(int a, const char *from, int b, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    if (below(to) && due()) FAIL;
    return real(a, from, b, to);
}
int mkdir(const char *path, mode_t bits) {
    REAL(int, "mkdir", const char *, mode_t);
    if (below(path) && due()) FAIL;
    return real(path, bits);
}
static int open_any(const char *name, const char *path, int flags, mode_t bits) {
    REAL(int, name, const char *, int, ...);
    if ((flags & O_CREAT) && below(path) && due()) FAIL;
    return real(path, flags, bits);
}
int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t bits = (flags & O_CREAT) ? va_arg(more, mode_t) : 0;
    va_end(more);
    return open_any("open", path, flags, bits);
}
int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t bits = (flags & O_CREAT) ? va_arg(more, mode_t) : 0;
    va_end(more);
    return open_any("open64", path, flags, bits);
}
