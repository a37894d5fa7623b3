/* Runs AOTInductor's models through libtorch's C functions, opened when the first one runs. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ms_kernels.h"

#define MAX_TENSORS 16
#define MAX_MODELS 64

typedef void *handle;

static _Thread_local char last_error[512] = "";

const char *ms_last_error(void) { return last_error; }

const char *ms_status_text(ms_status status) {
    switch (status) {
    case MS_OK: return "done";
    case MS_BAD_ARGUMENT: return "an argument does not fit";
    case MS_NO_LIBRARY: return "libtorch is not on the library path";
    case MS_NO_MODEL: return "there is no such operator";
    case MS_MODEL_ERROR: return "the operator reported an error";
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

static struct {
    int (*from_blob)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t,
                     int32_t, handle *, int32_t, const uint8_t *, int64_t);
    int (*discard)(handle);
    int (*data)(handle, void **);
    int (*rank)(handle, int64_t *);
    int (*sizes)(handle, int64_t **);
    int (*strides)(handle, int64_t **);
    int (*dtype)(handle, int32_t *);
} torch;
static int torch_ready = 0;

typedef struct {
    char path[1024];
    handle container;
    int (*run)(handle, handle *, size_t, handle *, size_t, void *, void *);
    int (*output_count)(handle, size_t *);
    int (*input_count)(handle, size_t *);
} model;
static model models[MAX_MODELS];
static int model_count = 0;

static ms_status open_torch(void) {
    if (torch_ready)
        return MS_OK;
    void *library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        return fail(MS_NO_LIBRARY, "libtorch_cpu.so does not open: %s", dlerror());
    struct { void **slot; const char *name; } needed[] = {
        {(void **)&torch.from_blob, "aoti_torch_create_tensor_from_blob_v2"},
        {(void **)&torch.discard, "aoti_torch_delete_tensor_object"},
        {(void **)&torch.data, "aoti_torch_get_data_ptr"},
        {(void **)&torch.rank, "aoti_torch_get_dim"},
        {(void **)&torch.sizes, "aoti_torch_get_sizes"},
        {(void **)&torch.strides, "aoti_torch_get_strides"},
        {(void **)&torch.dtype, "aoti_torch_get_dtype"},
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        *needed[i].slot = dlsym(library, needed[i].name);
        if (!*needed[i].slot)
            return fail(MS_NO_LIBRARY, "libtorch_cpu.so has no %s", needed[i].name);
    }
    torch_ready = 1;
    return MS_OK;
}

static ms_status open_model(const char *folder, const char *name, model **found) {
    model *next = &models[model_count];
    if (strchr(name, '/') || snprintf(next->path, sizeof next->path, "%s/%s.so", folder, name)
                                 >= (int)sizeof next->path)
        return fail(MS_BAD_ARGUMENT, "%s is no name of an operator, or %s is too long", name, folder);
    for (int i = 0; i < model_count; i++)
        if (!strcmp(models[i].path, next->path)) {
            *found = &models[i];
            return MS_OK;
        }
    if (model_count + 1 == MAX_MODELS)
        return fail(MS_BAD_ARGUMENT, "more than %d operators are open", MAX_MODELS - 1);
    void *library = dlopen(next->path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return fail(MS_NO_MODEL, "%s does not open: %s", name, dlerror());
    int (*create)(handle *, size_t, const char *, const char *) =
        (int (*)(handle *, size_t, const char *, const char *))dlsym(
            library, "AOTInductorModelContainerCreateWithDevice");
    *(void **)&next->run = dlsym(library, "AOTInductorModelContainerRun");
    *(void **)&next->input_count = dlsym(library, "AOTInductorModelContainerGetNumInputs");
    *(void **)&next->output_count = dlsym(library, "AOTInductorModelContainerGetNumOutputs");
    if (!create || !next->run || !next->input_count || !next->output_count)
        return fail(MS_NO_MODEL, "%s is no model of AOTInductor", next->path);
    if (create(&next->container, 1, "cpu", NULL))
        return fail(MS_MODEL_ERROR, "%s does not start", name);
    model_count++;
    *found = next;
    return MS_OK;
}

static int64_t bytes_of(int32_t dtype) {
    switch (dtype) {
    case MS_UINT8: return 1;
    case MS_FLOAT16: case MS_BFLOAT16: return 2;
    case MS_FLOAT32: case MS_INT32: return 4;
    case MS_INT64: return 8;
    }
    return 0;
}

/* Make libtorch's view of a tensor. */
static ms_status view(const ms_tensor *tensor, int place, handle *made) {
    if (tensor->rank < 0 || tensor->rank > 8 || !bytes_of(tensor->dtype) || !tensor->data)
        return fail(MS_BAD_ARGUMENT, "input %d: no data, a rank above 8, or an unknown dtype", place);
    int64_t strides[8], step = 1;
    for (int i = tensor->rank - 1; i >= 0; i--) {
        if (tensor->sizes[i] < 0)
            return fail(MS_BAD_ARGUMENT, "input %d: a size of %lld", place,
                        (long long)tensor->sizes[i]);
        strides[i] = step;
        step *= tensor->sizes[i] ? tensor->sizes[i] : 1;
    }
    if (torch.from_blob(tensor->data, tensor->rank, tensor->sizes, strides, 0, tensor->dtype, 0, 0,
                        made, 0, NULL, 0))
        return fail(MS_BAD_ARGUMENT, "input %d: libtorch refuses it", place);
    return MS_OK;
}

/* Copy a result, whatever its strides, into a contiguous output. */
static ms_status take(handle result, ms_tensor *output, int place) {
    int64_t rank = 0, *sizes = NULL, *strides = NULL, count = 1, index[8] = {0};
    int32_t dtype = -1;
    void *data = NULL;
    if (torch.rank(result, &rank) || torch.sizes(result, &sizes) ||
        torch.strides(result, &strides) || torch.dtype(result, &dtype) || torch.data(result, &data))
        return fail(MS_MODEL_ERROR, "output %d cannot be read", place);
    if (rank != output->rank || dtype != output->dtype || !output->data)
        return fail(MS_BAD_ARGUMENT, "output %d has rank %d and dtype %d; it must have %lld and %d",
                    place, output->rank, output->dtype, (long long)rank, dtype);
    for (int i = 0; i < rank; i++) {
        if (sizes[i] != output->sizes[i])
            return fail(MS_BAD_ARGUMENT, "output %d: size %d is %lld; it must be %lld", place, i,
                        (long long)output->sizes[i], (long long)sizes[i]);
        count *= sizes[i];
    }
    const int64_t bytes = bytes_of(dtype);
    for (int64_t n = 0; n < count; n++) {
        int64_t at = 0;
        for (int i = 0; i < rank; i++)
            at += index[i] * strides[i];
        memcpy((char *)output->data + n * bytes, (char *)data + at * bytes, (size_t)bytes);
        for (int i = (int)rank - 1; i >= 0 && ++index[i] == sizes[i]; i--)
            index[i] = 0;
    }
    return MS_OK;
}

ms_status ms_run(const char *folder, const char *name, const ms_tensor *inputs, int32_t input_count,
                 ms_tensor *outputs, int32_t output_count) {
    handle given[MAX_TENSORS], made[MAX_TENSORS];
    model *found = NULL;
    size_t takes = 0, makes = 0;
    if (!folder || !name || !inputs || !outputs)
        return fail(MS_BAD_ARGUMENT, "folder, name, inputs and outputs may not be NULL");
    ms_status status = open_torch();
    if (status == MS_OK)
        status = open_model(folder, name, &found);
    if (status != MS_OK)
        return status;
    if (found->input_count(found->container, &takes) || found->output_count(found->container, &makes))
        return fail(MS_MODEL_ERROR, "%s does not tell what it takes", name);
    if ((size_t)input_count != takes || (size_t)output_count != makes || takes > MAX_TENSORS ||
        makes > MAX_TENSORS)
        return fail(MS_BAD_ARGUMENT, "%s takes %zu tensors and makes %zu, not %d and %d", name, takes,
                    makes, input_count, output_count);
    for (int i = 0; i < input_count; i++) {
        status = view(&inputs[i], i, &given[i]);
        if (status != MS_OK) {
            while (i--)
                torch.discard(given[i]);
            return status;
        }
    }
    /* The model takes the inputs' handles over. */
    if (found->run(found->container, given, takes, made, makes, NULL, NULL))
        return fail(MS_MODEL_ERROR, "%s refuses these tensors: their sizes or dtypes are not those "
                    "it was compiled for", name);
    for (int i = 0; i < output_count; i++) {
        if (status == MS_OK)
            status = take(made[i], &outputs[i], i);
        torch.discard(made[i]);
    }
    return status;
}
