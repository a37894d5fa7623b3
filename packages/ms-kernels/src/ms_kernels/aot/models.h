/* The operators of ms-kernels for the CPU, compiled ahead of time by AOTInductor.
 *
 * They need libtorch's libraries at run time (libtorch_cpu.so on the library path), and neither
 * Python nor a compiler. Every function returns an ms_status; none ends the process.
 */
#ifndef MS_KERNELS_H
#define MS_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

typedef enum {
    MS_OK = 0,           /* done */
    MS_BAD_ARGUMENT = 1, /* an argument does not fit; nothing was written */
    MS_NO_LIBRARY = 2,   /* libtorch is not on the library path */
    MS_NO_MODEL = 3,     /* there is no such operator in the library's folder */
    MS_MODEL_ERROR = 4,  /* the operator reported an error */
} ms_status;

enum { MS_FLOAT32 = 6, MS_INT32 = 3, MS_INT64 = 4, MS_BFLOAT16 = 15, MS_FLOAT16 = 5, MS_UINT8 = 0 };

typedef struct {
    void *data;
    int32_t dtype;
    int32_t rank;
    int64_t sizes[8]; /* contiguous, the last one fastest */
} ms_tensor;

/* Open the operator NAME of the library in FOLDER and run it. Results are copied into the outputs,
 * whose dtypes and sizes must be those that the operator makes. One thread at a time. */
ms_status ms_run(const char *folder, const char *name, const ms_tensor *inputs, int32_t input_count,
                 ms_tensor *outputs, int32_t output_count);

/* What a status means. */
const char *ms_status_text(ms_status status);

/* What went wrong last in this thread, in one line. */
const char *ms_last_error(void);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif
