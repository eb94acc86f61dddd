// SPDX-License-Identifier: Apache-2.0
/// @file
/// Functions of the CUDA runtime that the emulation does not have. Each function fails and prints its name once; none succeeds
/// silently.
///
/// CUDA's headers are not included, because the parameters do not matter.
#include <cxxabi.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

extern "C" int emulated_refuse(const char* function);  // of cuda_runtime.cpp

namespace {

constexpr int success = 0;

/// Names of kernels, as PyTorch registers them at load time.
struct kernel_names {
  std::mutex lock;
  std::map<const void*, const char*> all;
};
kernel_names& names() {
  static auto* const only = new kernel_names;
  return *only;
}

int refuse_kernel(const void* kernel) {
  const char* name = nullptr;
  {
    const std::lock_guard guard(names().lock);
    const auto known = names().all.find(kernel);
    name = known == names().all.end() ? "of unknown name" : known->second;
  }
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> readable(abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return emulated_refuse(("to launch the kernel " + std::string(readable ? readable.get() : name)).c_str());
}

// --- the driver --------------------------------------------------------------------------------------------------------------

/// Replaces each function of the driver that PyTorch looks up by name.
constexpr std::size_t most_driver_functions = 96;
std::string* driver_names[most_driver_functions];

template <std::size_t k>
int driver_function(...) {
  return emulated_refuse(driver_names[k]->c_str());
}

template <std::size_t... k>
void* driver_function(std::size_t which, std::index_sequence<k...>) {
  static constexpr int (*all[])(...) = {&driver_function<k>...};
  return reinterpret_cast<void*>(all[which]);
}

/// cuDevicePrimaryCtxGetState: each device has a primary context.
int primary_context(int, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = 1;
  return success;
}

int driver_error(int, const char** text) {
  *text = "an error of the emulated driver";
  return success;
}

void* find_driver_function(const std::string& name) {
  if (name == "cuDevicePrimaryCtxGetState") return reinterpret_cast<void*>(&primary_context);
  if (name.rfind("cuLogs", 0) == 0) return nullptr;  // as in older drivers
  if (name == "cuGetErrorString") return reinterpret_cast<void*>(&driver_error);
  static auto* const lock = new std::mutex;
  const std::lock_guard guard(*lock);
  for (std::size_t k = 0; k < most_driver_functions; ++k) {
    if (driver_names[k] == nullptr) driver_names[k] = new std::string(name);
    if (*driver_names[k] == name) return driver_function(k, std::make_index_sequence<most_driver_functions>());
  }
  return nullptr;
}

}  // namespace

extern "C" {

int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, int* result) {
  *function = find_driver_function(name);
  if (result != nullptr) *result = *function != nullptr ? success : 1;  // cudaDriverEntryPointSymbolNotFound
  return success;
}

// --- kernels of CUDA ---------------------------------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(...) {}
void __cudaRegisterFunction(void**, const void* kernel, char*, const char* name, ...) {
  const std::lock_guard guard(names().lock);
  names().all[kernel] = name;
}
int __cudaPushCallConfiguration(...) { return success; }
int __cudaPopCallConfiguration(...) { return success; }
int __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return success;
}
int __cudaLaunchKernel(const void* kernel, ...) { return refuse_kernel(kernel); }
int cudaLaunchKernel(const void* kernel, ...) { return refuse_kernel(kernel); }
int cudaLaunchCooperativeKernel(const void* kernel, ...) { return refuse_kernel(kernel); }
int cudaLaunchKernelExC(const void*, const void* kernel, ...) { return refuse_kernel(kernel); }

// --- others ------------------------------------------------------------------------------------------------------------------

#define REFUSED(name) \
  int name(...) { return emulated_refuse(#name); }

REFUSED(cudaDeviceGetDefaultMemPool)
REFUSED(cudaDeviceGetGraphMemAttribute)
REFUSED(cudaDeviceSetGraphMemAttribute)
REFUSED(cudaFreeAsync)
REFUSED(cudaFuncGetAttributes)
REFUSED(cudaFuncSetAttribute)
REFUSED(cudaGetSymbolAddress)
REFUSED(cudaGraphAddNode)
REFUSED(cudaGraphConditionalHandleCreate)
REFUSED(cudaGraphNodeGetDependencies)
REFUSED(cudaIpcCloseMemHandle)
REFUSED(cudaIpcGetEventHandle)
REFUSED(cudaIpcGetMemHandle)
REFUSED(cudaIpcOpenEventHandle)
REFUSED(cudaIpcOpenMemHandle)
REFUSED(cudaKernelSetAttributeForDevice)
REFUSED(cudaLibraryGetGlobal)
REFUSED(cudaLibraryGetKernel)
REFUSED(cudaLibraryGetKernelCount)
REFUSED(cudaLibraryGetManaged)
REFUSED(cudaLibraryGetUnifiedFunction)
REFUSED(cudaLibraryLoadData)
REFUSED(cudaLibraryLoadFromFile)
REFUSED(cudaLibraryUnload)
REFUSED(cudaMallocAsync)
REFUSED(cudaMallocManaged)
REFUSED(cudaMemPoolGetAttribute)
REFUSED(cudaMemPoolSetAccess)
REFUSED(cudaMemPoolSetAttribute)
REFUSED(cudaMemPoolTrimTo)
REFUSED(cudaMemcpy2DAsync)
REFUSED(cudaMemcpyToSymbol)
REFUSED(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
REFUSED(cudaStreamBeginCaptureToGraph)
REFUSED(cudaStreamUpdateCaptureDependencies)

}  // extern "C"
