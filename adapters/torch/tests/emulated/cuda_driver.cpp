// SPDX-License-Identifier: Apache-2.0
/// @file
/// Replaces `libcuda.so.1`, so that libraries linked to the driver can be loaded. Each function fails and prints its name.
#include <cstdio>

namespace {

constexpr int not_supported = 801;  // CUDA_ERROR_NOT_SUPPORTED

int refuse(const char* function, bool& reported) {
  if (!reported) std::fprintf(stderr, "emulated CUDA driver: %s is not supported\n", function);
  reported = true;
  return not_supported;
}

}  // namespace

extern "C" {

int cuGetErrorString(int, const char** text) {
  *text = "not supported by the emulated driver";
  return 0;
}

/// Each device has a primary context.
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = 1;
  return 0;
}

#define REFUSED(name)               \
  int name(...) {                   \
    static bool reported = false;   \
    return refuse(#name, reported); \
  }

REFUSED(cuInit)
REFUSED(cuCtxGetCurrent)
REFUSED(cuCtxSetCurrent)
REFUSED(cuDeviceGet)
REFUSED(cuDeviceGetAttribute)
REFUSED(cuDevicePrimaryCtxRetain)
REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute)
REFUSED(cuFuncSetCacheConfig)
REFUSED(cuGetProcAddress_v2)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLaunchKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoad)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuPointerGetAttribute)
REFUSED(cuTensorMapEncodeTiled)

}  // extern "C"
