// The CUDA calls of a kernel's host code, answered by the emulator. One copy is linked into each
// kernel's library, so that the process's own CUDA runtime stays what it is.

#include <cstddef>
#include <cstring>

extern "C" {
int emulator_launch(int module, const char* name, const void* config, void** args);

int _cudaLaunchKernelEx(const void* config, void* kernel, void** args) {
    return emulator_launch(EMULATOR_MODULE, static_cast<const char*>(kernel), config, args);
}
int _cudaLibraryLoadData(void** library, const void* code, ...) {
    *library = const_cast<void*>(code);
    return 0;
}
int _cudaLibraryGetKernel(void** kernel, void*, const char* name) {
    *kernel = strdup(name);
    return 0;
}
int _cudaFuncSetAttribute(const void*, int, int) { return 0; }
int _cudaKernelSetAttributeForDevice(const void*, int, int, int) { return 0; }
int _cuKernelGetAttribute(int* value, int, const void*, int) { return *value = 0; }
int _cudaDeviceGetAttribute(int* value, int, int) {
    *value = 227 * 1024;  // asked only for the largest shared memory of a CTA
    return 0;
}
int _cudaGetDevice(int* device) { return *device = 0; }
int _cudaSetDevice(int) { return 0; }

int cuda_dialect_init_library_once(void** library, int (*init)(void**), int (*load)(void**, int), void*) {
    if (*library) return 0;
    void* code = nullptr;
    if (int error = init(&code)) return error;
    if (int error = load(&code, 0)) return error;
    *library = code;
    return 0;
}
void cuda_dialect_unload_library_once(void**) {}
}
