/* The descriptors created by aclCreate*, and the two phases of every aclnn call.

Descriptors are slots of one array, so that an entry point can check that its argument is a
descriptor of the right kind: an argument that does not match its signature is an error instead of a
crash. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

#define SLOTS 65536

static struct descriptor slots[SLOTS];
static int free_slots[SLOTS], free_count = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static performer perform;


static struct descriptor *take_slot(int kind, int64_t count) {
    struct descriptor *slot = NULL;
    pthread_mutex_lock(&lock);
    if (free_count < 0)
        for (free_count = 0; free_count < SLOTS; free_count++)
            free_slots[free_count] = SLOTS - 1 - free_count;
    if (free_count) slot = &slots[free_slots[--free_count]];
    pthread_mutex_unlock(&lock);
    if (!slot) {
        null_fail(FAILED, "more than %d descriptors are alive", SLOTS);
        return NULL;
    }
    memset(slot, 0, sizeof *slot);
    slot->kind = kind;
    slot->count = count;
    return slot;
}

static int valid(const void *pointer) {
    size_t distance = (size_t)((const char *)pointer - (const char *)slots);
    return distance < sizeof slots && distance % sizeof *slots == 0 &&
           ((const struct descriptor *)pointer)->kind;
}

static int release(void *pointer) {
    struct descriptor *old = pointer;
    if (!old) return 0;
    if (!valid(old)) return null_fail(FAILED, "destroyed something that is not a descriptor");
    if (old->kind != TENSOR && old->kind != SCALAR) free(old->data);
    old->kind = 0;
    pthread_mutex_lock(&lock);
    free_slots[free_count++] = (int)(old - slots);
    pthread_mutex_unlock(&lock);
    return 0;
}

static void *new_list(int kind, const void *items, uint64_t count, size_t width) {
    struct descriptor *created = take_slot(kind, (int64_t)count);
    if (!created) return NULL;
    created->data = malloc(count * width + 1);
    if (!created->data) {
        release(created);
        return NULL;
    }
    if (count) memcpy(created->data, items, count * width);
    return created;
}

EXPORT void *aclCreateTensor(const int64_t *sizes, uint64_t count, int dtype, const int64_t *strides,
                             int64_t offset, int format, const int64_t *storage,
                             uint64_t storage_dims, void *data) {
    if (count > DIMS) {
        null_fail(FAILED, "a tensor of %d dims; the null runtime takes %d", (int)count, DIMS);
        return NULL;
    }
    struct descriptor *created = take_slot(TENSOR, (int64_t)count);
    if (!created) return NULL;
    created->dtype = dtype;
    created->offset = offset;
    created->data = data;
    if (count) memcpy(created->sizes, sizes, count * sizeof *sizes);
    if (count) memcpy(created->strides, strides, count * sizeof *strides);
    return created;
}
EXPORT void *aclCreateScalar(const void *value, int dtype) {
    static const unsigned char widths[32] = {4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1,
                                             0, 0, 0, 8, 16, [27] = 2};
    int width = dtype >= 0 && dtype < 32 ? widths[dtype] : 0;
    struct descriptor *created = width ? take_slot(SCALAR, 1) : NULL;
    if (!width) null_fail(FAILED, "a scalar of dtype %d, which is unknown here", dtype);
    if (!created) return NULL;
    created->dtype = dtype;
    memcpy(created->value, value, (size_t)width);
    return created;
}
EXPORT void *aclCreateIntArray(const int64_t *v, uint64_t n) { return new_list(INTEGERS, v, n, 8); }
EXPORT void *aclCreateFloatArray(const float *v, uint64_t n) { return new_list(REALS, v, n, 4); }
EXPORT void *aclCreateBoolArray(const uint8_t *v, uint64_t n) { return new_list(BOOLEANS, v, n, 1); }
EXPORT void *aclCreateTensorList(void *const *v, uint64_t n) { return new_list(TENSORS, v, n, 8); }
EXPORT void *aclCreateScalarList(void *const *v, uint64_t n) { return new_list(SCALARS, v, n, 8); }

static int release_list(void *pointer) {
    struct descriptor *old = pointer;
    if (old && valid(old))
        for (int64_t i = 0; i < old->count; i++) release(((void **)old->data)[i]);
    return release(pointer);
}
EXPORT int aclDestroyTensor(void *p) { return release(p); }
EXPORT int aclDestroyScalar(void *p) { return release(p); }
EXPORT int aclDestroyIntArray(void *p) { return release(p); }
EXPORT int aclDestroyFloatArray(void *p) { return release(p); }
EXPORT int aclDestroyBoolArray(void *p) { return release(p); }
EXPORT int aclDestroyTensorList(void *p) { return release_list(p); }
EXPORT int aclDestroyScalarList(void *p) { return release_list(p); }
EXPORT int aclDestroyAclOpExecutor(void *p) { return release(p); }
EXPORT int aclSetAclOpExecutorRepeatable(void *p) { return null_absent(__func__); }
EXPORT int InitHugeMemThreadLocal(void *arena, int shared) { return 0; }
EXPORT void UnInitHugeMemThreadLocal(void *arena, int shared) {}
EXPORT void ReleaseHugeMem(void *arena, int shared) {}

/* Called from Python to set the function that performs calls, and the reason of a failure. */
EXPORT void null_set_performer(performer function) { perform = function; }
EXPORT void null_set_error(const char *text) { null_fail(FAILED, "%s", text); }
EXPORT int null_owns_memory(const void *start, size_t size) { return null_owns(start, size); }

int null_refuse(const char *name) {
    return null_fail(FAILED,
                     "the null runtime has no body for %s, so its result would be undefined; "
                     "add one to null_runtime.bodies", name);
}

int null_prepare(const char *name, int count, const struct argument *arguments, uint64_t *size,
                 void **executor) {
    for (int i = 0; i < count; i++) {
        int64_t code = arguments[i].code;
        const struct descriptor *argument = arguments[i].pointer;
        if (code == 'i' || code == 'r' || code == 's' || !argument) continue;
        if (!valid(argument) || argument->kind != code)
            return null_fail(FAILED, "%s: argument %d is not a descriptor of kind %c: the "
                             "null runtime's signature does not match this torch_npu", name, i, (int)code);
    }
    struct descriptor *created = new_list(EXECUTOR, arguments, (uint64_t)count, sizeof *arguments);
    if (!created) return FAILED;
    *size = 0;
    *executor = created;
    return 0;
}

int null_perform(const char *name, void *executor) {
    struct descriptor *call = executor;
    if (!call || !valid(call) || call->kind != EXECUTOR)
        return null_fail(FAILED, "%s: second phase without the first", name);
    if (!perform) return null_fail(FAILED, "%s cannot run; the null runtime was not started "
                                   "by null_runtime.start()", name);
    int code = perform(name, (int)call->count, call->data);
    release(call);
    return code;
}
