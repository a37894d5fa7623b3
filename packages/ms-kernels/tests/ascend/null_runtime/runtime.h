/* Shared by the C and Python parts of the null runtime and the generated entry points. */
#ifndef MS_NULL_RUNTIME_H
#define MS_NULL_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define FAILED 561103 /* torch_npu takes any code but 0 as an error */
#define ABSENT 507899 /* a driver's code for a missing device */
#define OUT_OF_MEMORY 507018
#define DIMS 16

enum kind {
    TENSOR = 'T',
    TENSORS = 'L',
    SCALAR = 'S',
    SCALARS = 'C',
    INTEGERS = 'I',
    REALS = 'F',
    BOOLEANS = 'B',
    EXECUTOR = 'X'
};

/* A tensor, scalar or list created by aclCreate*. Python reads the same layout. */
struct descriptor {
    int32_t kind; /* 0 in a free slot */
    int32_t dtype;
    int64_t count; /* dims of a tensor, items of a list */
    int64_t sizes[DIMS];
    int64_t strides[DIMS];
    int64_t offset;
    void *data; /* a tensor's storage or a list's items */
    unsigned char value[16];
};

/* One argument of an aclnn call; `code` is a kind, or i (integer), r (real), s (text). */
struct argument {
    int64_t code;
    int64_t integer;
    double real;
    void *pointer;
};

typedef int (*performer)(const char *name, int count, const struct argument *arguments);

int null_fail(int code, const char *format, ...);
int null_absent(const char *name);
int null_refuse(const char *name);
int null_owns(const void *start, size_t size);
int null_prepare(const char *name, int count, const struct argument *arguments, uint64_t *size,
                 void **executor);
int null_perform(const char *name, void *executor);

#endif
