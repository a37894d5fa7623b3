/* The descriptors that aclCreate* makes, and the two phases of every aclnn call.

Descriptors live in slots of one array, so that whatever an entry point is handed can be checked to
be one, and of the right kind: an argument that does not fit its signature is an error, not a crash. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

#define SLOTS 65536

static struct descriptor slots[SLOTS];
static int spare[SLOTS], spares = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static performer perform;


static struct descriptor *take(int kind, int64_t count) {
    struct descriptor *taken = NULL;
    pthread_mutex_lock(&lock);
    if (spares < 0)
        for (spares = 0; spares < SLOTS; spares++) spare[spares] = SLOTS - 1 - spares;
    if (spares) taken = &slots[spare[--spares]];
    pthread_mutex_unlock(&lock);
    if (!taken) {
        null_fail(FAILED, "more than %d descriptors are alive", SLOTS);
        return NULL;
    }
    memset(taken, 0, sizeof *taken);
    taken->kind = kind;
    taken->count = count;
    return taken;
}

static int valid(const void *pointer) {
    size_t distance = (size_t)((const char *)pointer - (const char *)slots);
    return distance < sizeof slots && distance % sizeof *slots == 0 &&
           ((const struct descriptor *)pointer)->kind;
}

static int give_back(void *pointer) {
    struct descriptor *old = pointer;
    if (!old) return 0;
    if (!valid(old)) return null_fail(FAILED, "a descriptor is destroyed that is none");
    if (old->kind != TENSOR && old->kind != SCALAR) free(old->data);
    old->kind = 0;
    pthread_mutex_lock(&lock);
    spare[spares++] = (int)(old - slots);
    pthread_mutex_unlock(&lock);
    return 0;
}

static void *list(int kind, const void *items, uint64_t count, size_t width) {
    struct descriptor *made = take(kind, (int64_t)count);
    if (!made) return NULL;
    made->data = malloc(count * width + 1);
    if (!made->data) {
        give_back(made);
        return NULL;
    }
    if (count) memcpy(made->data, items, count * width);
    return made;
}

EXPORT void *aclCreateTensor(const int64_t *sizes, uint64_t count, int dtype, const int64_t *strides,
                             int64_t offset, int format, const int64_t *storage,
                             uint64_t storage_dims, void *data) {
    if (count > DIMS) {
        null_fail(FAILED, "a tensor of %d dims; the null runtime takes %d", (int)count, DIMS);
        return NULL;
    }
    struct descriptor *made = take(TENSOR, (int64_t)count);
    if (!made) return NULL;
    made->dtype = dtype;
    made->offset = offset;
    made->data = data;
    if (count) memcpy(made->sizes, sizes, count * sizeof *sizes);
    if (count) memcpy(made->strides, strides, count * sizeof *strides);
    return made;
}
EXPORT void *aclCreateScalar(const void *value, int dtype) {
    static const unsigned char widths[32] = {4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1,
                                             0, 0, 0, 8, 16, [27] = 2};
    int width = dtype >= 0 && dtype < 32 ? widths[dtype] : 0;
    struct descriptor *made = width ? take(SCALAR, 1) : NULL;
    if (!width) null_fail(FAILED, "a scalar of dtype %d, which is unknown here", dtype);
    if (!made) return NULL;
    made->dtype = dtype;
    memcpy(made->value, value, (size_t)width);
    return made;
}
EXPORT void *aclCreateIntArray(const int64_t *v, uint64_t n) { return list(INTEGERS, v, n, 8); }
EXPORT void *aclCreateFloatArray(const float *v, uint64_t n) { return list(REALS, v, n, 4); }
EXPORT void *aclCreateBoolArray(const uint8_t *v, uint64_t n) { return list(BOOLEANS, v, n, 1); }
EXPORT void *aclCreateTensorList(void *const *v, uint64_t n) { return list(TENSORS, v, n, 8); }
EXPORT void *aclCreateScalarList(void *const *v, uint64_t n) { return list(SCALARS, v, n, 8); }

static int give_back_all(void *pointer) {
    struct descriptor *old = pointer;
    if (old && valid(old))
        for (int64_t i = 0; i < old->count; i++) give_back(((void **)old->data)[i]);
    return give_back(pointer);
}
EXPORT int aclDestroyTensor(void *p) { return give_back(p); }
EXPORT int aclDestroyScalar(void *p) { return give_back(p); }
EXPORT int aclDestroyIntArray(void *p) { return give_back(p); }
EXPORT int aclDestroyFloatArray(void *p) { return give_back(p); }
EXPORT int aclDestroyBoolArray(void *p) { return give_back(p); }
EXPORT int aclDestroyTensorList(void *p) { return give_back_all(p); }
EXPORT int aclDestroyScalarList(void *p) { return give_back_all(p); }
EXPORT int aclDestroyAclOpExecutor(void *p) { return give_back(p); }
EXPORT int aclSetAclOpExecutorRepeatable(void *p) { return null_absent(__func__); }
EXPORT int InitHugeMemThreadLocal(void *arena, int shared) { return 0; }
EXPORT void UnInitHugeMemThreadLocal(void *arena, int shared) {}
EXPORT void ReleaseHugeMem(void *arena, int shared) {}

/* The Python half says here what performs a call, and why one failed. */
EXPORT void null_set_performer(performer chosen) { perform = chosen; }
EXPORT void null_set_error(const char *text) { null_fail(FAILED, "%s", text); }
EXPORT int null_owns_memory(const void *start, size_t size) { return null_owns(start, size); }

int null_refuse(const char *name) {
    return null_fail(FAILED,
                     "the null runtime has no body for %s, so its result would be undefined; "
                     "null_runtime.bodies is where one belongs", name);
}

int null_prepare(const char *name, int count, const struct argument *arguments, uint64_t *size,
                 void **executor) {
    for (int i = 0; i < count; i++) {
        int64_t code = arguments[i].code;
        const struct descriptor *given = arguments[i].pointer;
        if (code == 'i' || code == 'r' || code == 's' || !given) continue;
        if (!valid(given) || given->kind != code)
            return null_fail(FAILED, "%s: argument %d is no descriptor of kind %c: the signature in "
                             "the null runtime does not fit this torch_npu", name, i, (int)code);
    }
    struct descriptor *made = list(EXECUTOR, arguments, (uint64_t)count, sizeof *arguments);
    if (!made) return FAILED;
    *size = 0;
    *executor = made;
    return 0;
}

int null_perform(const char *name, void *executor) {
    struct descriptor *call = executor;
    if (!call || !valid(call) || call->kind != EXECUTOR)
        return null_fail(FAILED, "%s: its second phase came without the first", name);
    if (!perform) return null_fail(FAILED, "%s: nothing performs it; the null runtime was not started "
                                   "by null_runtime.start()", name);
    int code = perform(name, (int)call->count, call->data);
    give_back(call);
    return code;
}
