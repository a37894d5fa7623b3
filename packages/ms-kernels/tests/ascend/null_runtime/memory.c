/* Memory, streams and events of a device emulated on the host, where every call is synchronous.

Allocated and freed memory is filled with 0xff, a NaN in every float format, so that elements that
an operator did not write cannot pass for results. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

#define BLOCKS 65536
#define DEVICE_BYTES (64ULL << 30)

static __thread char message[1024] = "no error";
static __thread int unread; /* whether message holds the unread reason of a failure */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { char *start; size_t size; } blocks[BLOCKS];
static int block_count;

int null_fail(int code, const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    vsnprintf(message, sizeof message, format, rest);
    va_end(rest);
    unread = 1;
    return code;
}

/* torch_npu calls some of these after an operator failed; that reason must stay. */
int null_absent(const char *name) {
    if (!unread)
        snprintf(message, sizeof message, "the null runtime has no %s: there is no NPU", name);
    return ABSENT;
}

int null_owns(const void *start, size_t size) {
    int owned = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < block_count && !owned; i++)
        owned = (const char *)start >= blocks[i].start &&
                (const char *)start + size <= blocks[i].start + blocks[i].size;
    pthread_mutex_unlock(&lock);
    return owned;
}

static int allocate(void **result, size_t size) {
    size_t padded_size = (size + 511) / 512 * 512 + 512; /* kernels may read 32 bytes past the end */
    int code = 0;
    *result = aligned_alloc(512, padded_size);
    if (!*result) return null_fail(OUT_OF_MEMORY, "no memory for %zu bytes", size);
    memset(*result, 0xff, padded_size);
    pthread_mutex_lock(&lock);
    if (block_count < BLOCKS) {
        blocks[block_count].start = *result;
        blocks[block_count++].size = padded_size;
    } else {
        code = null_fail(OUT_OF_MEMORY, "more than %d memory blocks are allocated", BLOCKS);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int release(void *start) {
    int code = FAILED;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < block_count; i++)
        if (blocks[i].start == start) {
            memset(start, 0xff, blocks[i].size);
            blocks[i] = blocks[--block_count];
            code = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    if (code) return null_fail(code, "freed memory that was not allocated");
    free(start);
    return 0;
}

static int copy(void *to, size_t room, const void *from, size_t size) {
    if (size > room) return null_fail(FAILED, "a copy of %zu bytes into %zu", size, room);
    memmove(to, from, size);
    return 0;
}

static int fill(void *to, size_t room, int byte, size_t size) {
    if (size > room) return null_fail(FAILED, "a fill of %zu bytes into %zu", size, room);
    memset(to, byte, size);
    return 0;
}

EXPORT const char *aclGetRecentErrMsg(void) {
    unread = 0;
    return message;
}
EXPORT const char *aclrtGetSocName(void) {
    const char *name = getenv("MS_NULL_RUNTIME_SOC");
    return name ? name : "Ascend910B1";
}

EXPORT int aclrtMalloc(void **p, size_t n, int policy) { return allocate(p, n); }
EXPORT int aclrtMallocAlign32(void **p, size_t n, int policy) { return allocate(p, n); }
EXPORT int aclrtMallocHost(void **p, size_t n) { return allocate(p, n); }
EXPORT int aclrtFree(void *p) { return release(p); }
EXPORT int aclrtFreeHost(void *p) { return release(p); }
EXPORT int aclrtMemcpy(void *d, size_t m, const void *s, size_t n, int k) { return copy(d, m, s, n); }
EXPORT int aclrtMemcpyAsync(void *d, size_t m, const void *s, size_t n, int k, void *stream) {
    return copy(d, m, s, n);
}
EXPORT int aclrtMemcpyAsyncWithCondition(void *d, size_t m, const void *s, size_t n, int k,
                                         void *stream) {
    return copy(d, m, s, n);
}
EXPORT int aclrtMemset(void *d, size_t m, int v, size_t n) { return fill(d, m, v, n); }
EXPORT int aclrtMemsetAsync(void *d, size_t m, int v, size_t n, void *stream) {
    return fill(d, m, v, n);
}
EXPORT int aclrtGetMemInfo(int kind, size_t *available, size_t *total) {
    size_t allocated = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < block_count; i++) allocated += blocks[i].size;
    pthread_mutex_unlock(&lock);
    if (available) *available = allocated < DEVICE_BYTES ? DEVICE_BYTES - allocated : 0;
    if (total) *total = DEVICE_BYTES;
    return 0;
}

/* One device and one context; streams and events are empty handles. */
static char context[64];
static int handle(void **result) {
    *result = calloc(1, 64);
    return *result ? 0 : null_fail(OUT_OF_MEMORY, "no memory for a handle");
}
static int discard(void *old) {
    free(old);
    return 0;
}
#define DONE(name, ...) \
    EXPORT int name(__VA_ARGS__) { return 0; }
#define SETS(name, type, value, ...) \
    EXPORT int name(__VA_ARGS__) { \
        if (result) *result = (type)(value); \
        return 0; \
    }
DONE(aclInit, const char *path)
DONE(aclFinalize, void)
DONE(aclmdlInitDump, void)
DONE(aclmdlFinalizeDump, void)
DONE(aclmdlSetDump, const char *path)
DONE(aclAppLog, void)
DONE(aclSetCompileopt, int option, const char *value)
DONE(aclrtSetDevice, int device)
DONE(aclrtResetDevice, int device)
DONE(aclrtResetDeviceForce, int device)
DONE(aclrtSetCurrentContext, void *c)
DONE(aclrtSynchronizeDevice, void)
DONE(aclrtSynchronizeDeviceWithTimeout, int t)
DONE(aclrtSynchronizeStream, void *s)
DONE(aclrtSynchronizeStreamWithTimeout, void *s, int t)
DONE(aclrtRecordEvent, void *e, void *s)
DONE(aclrtResetEvent, void *e, void *s)
DONE(aclrtSynchronizeEvent, void *e)
DONE(aclrtStreamWaitEvent, void *s, void *e)
DONE(aclrtGetOverflowStatus, void)
DONE(aclrtPeekAtLastError, int level)
DONE(aclrtGetLastError, int level)
DONE(aclrtSetOpWaitTimeout, unsigned t)
DONE(aclrtSetOpExecuteTimeOut, unsigned t)
DONE(aclrtSetDeviceSatMode, int mode)
DONE(aclrtSetStreamFailureMode, void *s, uint64_t mode)
DONE(aclrtSetStreamOverflowSwitch, void *s, unsigned on)
DONE(aclrtSetSysParamOpt, int option, int64_t value)
DONE(aclrtCtxSetSysParamOpt, int option, int64_t value)
SETS(aclrtSetOpExecuteTimeOutV2, uint64_t, timeout_us, uint64_t timeout_us, uint64_t *result)
SETS(aclrtGetDevice, int, 0, int *result)
SETS(aclrtGetDeviceCount, unsigned, 1, unsigned *result)
SETS(aclrtCreateContext, void *, context, void **result, int device)
SETS(aclrtGetCurrentContext, void *, context, void **result)
SETS(aclrtStreamQuery, int, 0, void *s, int *result)
SETS(aclrtStreamGetId, int, 0, void *s, int *result)
SETS(aclrtQueryEventStatus, int, 1, void *e, int *result)
SETS(aclrtQueryEventWaitStatus, int, 1, void *e, int *result)
SETS(aclrtEventElapsedTime, float, 0, float *result, void *start, void *end)
SETS(aclrtGetRunMode, int, 1, int *result)
SETS(aclrtDeviceCanAccessPeer, int, 0, int *result, int device, int peer)
SETS(aclGetDeviceCapability, int64_t, 0, unsigned device, int kind, int64_t *result)
SETS(aclrtGetDeviceInfo, int64_t, 0, unsigned device, int kind, int64_t *result)
SETS(aclrtGetSysParamOpt, int64_t, 0, int option, int64_t *result)
SETS(aclrtCtxGetSysParamOpt, int64_t, 0, int option, int64_t *result)
SETS(aclGetCannAttribute, int, 1, int attribute, int *result)
EXPORT int aclmdlRICaptureGetInfo(void *s, int *status, void **model) {
    if (status) *status = 0; /* no graph is being captured */
    if (model) *model = NULL;
    return 0;
}
EXPORT int aclrtDeviceGetUuid(int device, unsigned char *identity) {
    memset(identity, 0, 16);
    return 0;
}
EXPORT int aclrtCreateStream(void **s) { return handle(s); }
EXPORT int aclrtCreateStreamWithConfig(void **s, unsigned p, unsigned f) { return handle(s); }
EXPORT int aclrtDestroyStream(void *s) { return discard(s); }
EXPORT int aclrtDestroyStreamForce(void *s) { return discard(s); }
EXPORT int aclrtCreateEvent(void **e) { return handle(e); }
EXPORT int aclrtCreateEventWithFlag(void **e, unsigned flag) { return handle(e); }
EXPORT int aclrtCreateEventExWithFlag(void **e, unsigned flag) { return handle(e); }
EXPORT int aclrtDestroyEvent(void *e) { return discard(e); }
EXPORT int aclGetCannAttributeList(const int **list, size_t *count) {
    static const int attributes[] = {1};
    if (list) *list = attributes;
    if (count) *count = 1;
    return 0;
}
EXPORT size_t aclGetCompileoptSize(int option) { return sizeof "disable"; }
EXPORT int aclGetCompileopt(int option, char *value, size_t room) {
    return copy(value, room, "disable", sizeof "disable");
}
