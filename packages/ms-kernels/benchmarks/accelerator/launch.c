/* Launches a kernel of the library built for this chip, and checks what it wrote. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "ms_kernels.h"

enum { ROWS = 3, WIDTH = 4096, COUNT = ROWS * WIDTH };
typedef unsigned long long address;

int main(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*start)(unsigned) = dlsym(driver, "cuInit");
    int (*retain)(void **, int) = dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*select)(void *) = dlsym(driver, "cuCtxSetCurrent");
    int (*get)(address *, size_t) = dlsym(driver, "cuMemAlloc_v2");
    int (*put)(address, const void *, size_t) = dlsym(driver, "cuMemcpyHtoD_v2");
    int (*take)(void *, address, size_t) = dlsym(driver, "cuMemcpyDtoH_v2");
    static float x[COUNT], weight[WIDTH], y[COUNT];
    void *context = NULL;
    address at[4];
    if (ms_scale_cast_fp32(NULL, (void *)64, (void *)64, (void *)64, 16, 1.0f) != MS_NO_DEVICE)
        return 80; /* no context is current yet */
    if (start(0) || retain(&context, 0) || select(context)) return 81;
    size_t sizes[4] = {sizeof x, sizeof weight, sizeof y, ROWS * sizeof(float)};
    for (int i = 0; i < 4; i++) if (get(&at[i], sizes[i])) return 82;
    for (int i = 0; i < COUNT; i++) x[i] = (float)(i % 29) - 14;
    for (int i = 0; i < WIDTH; i++) weight[i] = 1 + 1e-4f * i;
    if (put(at[0], x, sizeof x) || put(at[1], weight, sizeof weight)) return 83;
    ms_status status = ms_rms_norm_forward_fp32_4096(NULL, (void *)at[0], (void *)at[0],
        (void *)at[1], (void *)at[2], (void *)at[2], (void *)at[3], ROWS, WIDTH, WIDTH, WIDTH,
        1e-6f);
    if (status) { printf("%s: %s\n", ms_status_text(status), ms_last_error()); return 84; }
    if (take(y, at[2], sizeof y)) return 85;
    double worst = 0;
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        for (int i = 0; i < WIDTH; i++) sum += (double)x[r * WIDTH + i] * x[r * WIDTH + i];
        double scale = 1 / sqrt(sum / WIDTH + 1e-6);
        for (int i = 0; i < WIDTH; i++) {
            double off = fabs(y[r * WIDTH + i] - x[r * WIDTH + i] * scale * weight[i]);
            if (off > worst) worst = off;
        }
    }
    printf("largest error %.3g\n", worst);
    return worst < 1e-5 ? 0 : 86;
}
