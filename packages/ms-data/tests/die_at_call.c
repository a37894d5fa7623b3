/* Preloaded into a process, kills it at its n-th call that changes files, halfway through a write.

   `die_at(n)` starts the count; 0 stops it. Writes to pipes and terminals do not count. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long remaining;

void die_at(long n) { atomic_store(&remaining, n); }

static int is_last(void) {
  return atomic_load(&remaining) > 0 && atomic_fetch_sub(&remaining, 1) == 1;
}

static void count(void) {
  if (is_last()) kill(getpid(), SIGKILL);
}

static int is_file(int descriptor) {
  struct stat info;
  return fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int to, const void *from, size_t size) {
  if (is_file(to) && is_last()) {
    REAL(write)(to, from, size / 2);
    kill(getpid(), SIGKILL);
  }
  return REAL(write)(to, from, size);
}

ssize_t writev(int to, const struct iovec *parts, int n) {
  if (is_file(to)) count();
  return REAL(writev)(to, parts, n);
}

#define PWRITE(name, offset_type)                                             \
  ssize_t name(int to, const void *from, size_t size, offset_type at) {       \
    if (is_last()) {                                                          \
      REAL(name)(to, from, size / 2, at);                                     \
      kill(getpid(), SIGKILL);                                                \
    }                                                                         \
    return REAL(name)(to, from, size, at);                                    \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define COUNTED(name, parameters, ...) \
  int name parameters {                \
    count();                           \
    return REAL(name)(__VA_ARGS__);    \
  }
COUNTED(fsync, (int file), file)
COUNTED(fdatasync, (int file), file)
COUNTED(ftruncate, (int file, off_t size), file, size)
COUNTED(ftruncate64, (int file, off64_t size), file, size)
COUNTED(rename, (const char *from, const char *to), from, to)
COUNTED(renameat, (int a, const char *from, int b, const char *to), a, from, b, to)
COUNTED(link, (const char *from, const char *to), from, to)
COUNTED(unlink, (const char *path), path)
COUNTED(unlinkat, (int folder, const char *path, int flags), folder, path, flags)
COUNTED(mkdir, (const char *path, mode_t mode), path, mode)
COUNTED(mkdirat, (int folder, const char *path, mode_t mode), folder, path, mode)
COUNTED(rmdir, (const char *path), path)

/* Opening changes files if it creates or truncates one. */
#define OPEN(name, parameters, ...)                                    \
  int name parameters {                                                \
    va_list more;                                                      \
    va_start(more, flags);                                             \
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;          \
    va_end(more);                                                      \
    if (flags & (O_CREAT | O_TRUNC)) count();                          \
    return REAL(name)(__VA_ARGS__, mode);                              \
  }
OPEN(open, (const char *path, int flags, ...), path, flags)
OPEN(open64, (const char *path, int flags, ...), path, flags)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, path, flags)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, path, flags)
