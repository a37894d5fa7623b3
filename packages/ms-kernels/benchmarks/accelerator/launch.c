/* Launch a kernel of the library built for this chip and check its output. */
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
    int (*allocate)(address *, size_t) = dlsym(driver, "cuMemAlloc_v2");
    int (*upload)(address, const void *, size_t) = dlsym(driver, "cuMemcpyHtoD_v2");
    int (*download)(void *, address, size_t) = dlsym(driver, "cuMemcpyDtoH_v2");
    static float x[COUNT], weight[WIDTH], y[COUNT];
    void *context = NULL;
    address buffers[4];
    if (ms_scale_cast_fp32(NULL, (void *)64, (void *)64, (void *)64, 16, 1.0f) != MS_NO_DEVICE)
        return 80; /* no current context yet */
    if (start(0) || retain(&context, 0) || select(context)) return 81;
    size_t sizes[4] = {sizeof x, sizeof weight, sizeof y, ROWS * sizeof(float)};
    for (int i = 0; i < 4; i++) if (allocate(&buffers[i], sizes[i])) return 82;
    for (int i = 0; i < COUNT; i++) x[i] = (float)(i % 29) - 14;
    for (int i = 0; i < WIDTH; i++) weight[i] = 1 + 1e-4f * i;
    if (upload(buffers[0], x, sizeof x) || upload(buffers[1], weight, sizeof weight)) return 83;
    ms_status status = ms_rms_norm_forward_fp32_4096(NULL, (void *)buffers[0], (void *)buffers[0],
        (void *)buffers[1], (void *)buffers[2], (void *)buffers[2], (void *)buffers[3], ROWS, WIDTH,
        WIDTH, WIDTH, 1e-6f);
    if (status) { printf("%s: %s\n", ms_status_text(status), ms_last_error()); return 84; }
    if (download(y, buffers[2], sizeof y)) return 85;
    double max_error = 0;
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        for (int i = 0; i < WIDTH; i++) sum += (double)x[r * WIDTH + i] * x[r * WIDTH + i];
        double scale = 1 / sqrt(sum / WIDTH + 1e-6);
        for (int i = 0; i < WIDTH; i++) {
            double error = fabs(y[r * WIDTH + i] - x[r * WIDTH + i] * scale * weight[i]);
            if (error > max_error) max_error = error;
        }
    }
    printf("largest error %.3g\n", max_error);
    return max_error < 1e-5 ? 0 : 86;
}
