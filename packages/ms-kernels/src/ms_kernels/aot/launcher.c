/* Launches compiled kernels through the driver, which is opened when the first one runs.
 *
 * Nothing here ends the process. Every function returns an ms_status; ms_last_error() says in one
 * line what went wrong in this thread. Compiled with -DMS_HIP for AMD's driver.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "ms_kernels.h"

#define MAX_DEVICES 64

typedef struct {
    const char *name;
    const char *symbol;
    const unsigned char *binary;
    unsigned threads;
    unsigned shared_bytes;
    void *functions[MAX_DEVICES];
} ms_kernel;

static _Thread_local char last_error[512] = "";
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

const char *ms_last_error(void) { return last_error; }

const char *ms_status_text(ms_status status) {
    switch (status) {
    case MS_OK: return "done";
    case MS_BAD_ARGUMENT: return "an argument does not fit";
    case MS_NO_DRIVER: return "the driver's library is not on this machine";
    case MS_NO_DEVICE: return "no device, or no current context";
    case MS_WRONG_CHIP: return "the library was built for another chip";
    case MS_DRIVER_ERROR: return "the driver reported an error";
    }
    return "no such status";
}

static ms_status fail(ms_status status, const char *form, ...) {
    va_list arguments;
    va_start(arguments, form);
    vsnprintf(last_error, sizeof last_error, form, arguments);
    va_end(arguments);
    return status;
}

/* Both drivers return 0 for success. */
static struct {
    int (*initialize)(unsigned);
    int (*get_device)(int *);
    int (*load)(void **, const void *);
    int (*find)(void **, void *, const char *);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  void *, void **, void **);
#ifdef MS_HIP
    const char *(*text)(int);
#else
    int (*get_context)(void **);
    int (*get_attribute)(int *, int, int);
    int (*set_attribute)(void *, int, int);
    int (*text)(int, const char **);
#endif
} driver;
static int driver_ready = 0;

static const char *text_of(int code) {
    const char *text = NULL;
#ifdef MS_HIP
    text = driver.text(code);
#else
    driver.text(code, &text);
#endif
    return text ? text : "unknown error";
}

#ifdef MS_HIP
static const char *const LIBRARIES[] = {"libamdhip64.so", "libamdhip64.so.6", "libamdhip64.so.7"};
#define NEEDED(field, name) {(void **)&driver.field, "hip" name}
#else
static const char *const LIBRARIES[] = {"libcuda.so.1", "libcuda.so"};
#define NEEDED(field, name) {(void **)&driver.field, "cu" name}
#endif

static ms_status open_driver(void) {
    void *library = NULL;
    for (size_t i = 0; !library && i < sizeof LIBRARIES / sizeof *LIBRARIES; i++)
        library = dlopen(LIBRARIES[i], RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        return fail(MS_NO_DRIVER, "%s is not on this machine: %s", LIBRARIES[0], dlerror());
    struct { void **slot; const char *name; } needed[] = {
        NEEDED(initialize, "Init"),
        NEEDED(load, "ModuleLoadData"),
        NEEDED(find, "ModuleGetFunction"),
#ifdef MS_HIP
        NEEDED(get_device, "GetDevice"),
        NEEDED(launch, "ModuleLaunchKernel"),
        NEEDED(text, "GetErrorString"),
#else
        NEEDED(get_device, "CtxGetDevice"),
        NEEDED(get_context, "CtxGetCurrent"),
        NEEDED(get_attribute, "DeviceGetAttribute"),
        NEEDED(set_attribute, "FuncSetAttribute"),
        NEEDED(launch, "LaunchKernel"),
        NEEDED(text, "GetErrorString"),
#endif
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        *needed[i].slot = dlsym(library, needed[i].name);
        if (!*needed[i].slot)
            return fail(MS_NO_DRIVER, "%s has no %s", LIBRARIES[0], needed[i].name);
    }
    int code = driver.initialize(0);
    if (code)
        return fail(MS_NO_DEVICE, "the driver does not start: %s", text_of(code));
    driver_ready = 1;
    return MS_OK;
}

/* Find the device that work goes to now. */
static ms_status current_device(int *device) {
#ifndef MS_HIP
    void *context = NULL;
    int got = driver.get_context(&context);
    if (got || !context)
        return fail(MS_NO_DEVICE, "no context is current in this thread; select a device first");
#endif
    int code = driver.get_device(device);
    if (code)
        return fail(MS_NO_DEVICE, "no current device: %s", text_of(code));
    if (*device < 0 || *device >= MAX_DEVICES)
        return fail(MS_NO_DEVICE, "device %d is beyond the %d that are supported", *device, MAX_DEVICES);
    return MS_OK;
}

static ms_status load(ms_kernel *kernel, int device) {
#ifndef MS_HIP
    int major = 0, minor = 0;
    driver.get_attribute(&major, 75, device);
    driver.get_attribute(&minor, 76, device);
    if (10 * major + minor != MS_CAPABILITY)
        return fail(MS_WRONG_CHIP, "%s was built for sm_%d; device %d is sm_%d", kernel->name,
                    MS_CAPABILITY, device, 10 * major + minor);
#endif
    void *module = NULL, *function = NULL;
    int code = driver.load(&module, kernel->binary);
    if (code == 209) /* no binary for this device, in either driver */
        return fail(MS_WRONG_CHIP, "%s was built for " MS_TARGET ", which device %d is not",
                    kernel->name, device);
    if (!code)
        code = driver.find(&function, module, kernel->symbol);
#ifndef MS_HIP
    if (!code && kernel->shared_bytes > 48 * 1024)
        code = driver.set_attribute(function, 8, (int)kernel->shared_bytes);
#endif
    if (code)
        return fail(MS_DRIVER_ERROR, "%s does not load: %s", kernel->name, text_of(code));
    kernel->functions[device] = function;
    return MS_OK;
}

static ms_status prepare(ms_kernel *kernel, void **function) {
    int device = 0;
    ms_status status = driver_ready ? MS_OK : open_driver();
    if (status == MS_OK)
        status = current_device(&device);
    if (status == MS_OK && !kernel->functions[device])
        status = load(kernel, device);
    if (status == MS_OK)
        *function = kernel->functions[device];
    return status;
}

static ms_status launch(ms_kernel *kernel, ms_stream stream, int64_t tiles, int32_t *first,
                        void **parameters) {
    const int64_t most = 0x7fffffff;
    if (tiles < 0 || tiles > most)
        return fail(MS_BAD_ARGUMENT, "%s: sizes make %lld tiles; there may be 0 to %lld",
                    kernel->name, (long long)tiles, (long long)most);
    if (!tiles)
        return MS_OK;
    void *function = NULL;
    pthread_mutex_lock(&lock);
    ms_status status = prepare(kernel, &function);
    pthread_mutex_unlock(&lock);
    if (status != MS_OK)
        return status;
    *first = 0;
    int code = driver.launch(function, (unsigned)tiles, 1, 1, kernel->threads, 1, 1,
                             kernel->shared_bytes, stream, parameters, NULL);
    if (code)
        return fail(MS_DRIVER_ERROR, "%s does not start: %s", kernel->name, text_of(code));
    return MS_OK;
}

static int64_t cdiv(int64_t count, int64_t size) { return (count + size - 1) / size; }

static ms_status check_size(const char *kernel, const char *name, int64_t value, int64_t least,
                            int64_t most, int64_t multiple) {
    if (value < least || value > most)
        return fail(MS_BAD_ARGUMENT, "%s: %s is %lld; it must be from %lld to %lld", kernel, name,
                    (long long)value, (long long)least, (long long)most);
    if (value % multiple)
        return fail(MS_BAD_ARGUMENT, "%s: %s is %lld; it must be a multiple of %lld", kernel, name,
                    (long long)value, (long long)multiple);
    return MS_OK;
}

static ms_status check_pointer(const char *kernel, const char *name, const void *pointer) {
    if (!pointer || (uintptr_t)pointer % 16)
        return fail(MS_BAD_ARGUMENT, "%s: %s is %p; it must be an address, a multiple of 16",
                    kernel, name, (void *)pointer);
    return MS_OK;
}

#include "table.c"
