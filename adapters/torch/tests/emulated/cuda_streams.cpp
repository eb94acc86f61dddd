// SPDX-License-Identifier: Apache-2.0
/// @file
/// The CUDA runtime on the emulated hardware: streams, events, captures and graphs.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_runtime.hpp"

namespace emulated::cuda {
namespace {

struct timed_event {
  std::shared_ptr<event> mark = make_event();
  bool timed = true, recorded = false;
};
timed_event& of(cudaEvent_t e) { return *reinterpret_cast<timed_event*>(e); }

/// An object that is destroyed with the last graph that holds it.
class user_object {
 public:
  user_object(void* data, cudaHostFn_t destroy, unsigned references) : data_(data), destroy_(destroy), references_(references) {}
  void retain(unsigned count) { references_ += count; }
  void release(unsigned count) {
    if ((references_ -= count) > 0) return;
    destroy_(data_);
    delete this;
  }

 private:
  void* data_;
  cudaHostFn_t destroy_;
  std::atomic<unsigned> references_;
};

/// A graph or an executable graph: both hold user objects.
struct held_graph {
  std::shared_ptr<graph> jobs;
  std::vector<std::pair<user_object*, unsigned>> objects;

  held_graph() = default;
  held_graph(const held_graph& other) : jobs(other.jobs), objects(other.objects) {
    for (auto& [object, count] : objects) object->retain(count);
  }
  ~held_graph() {
    for (auto& [object, count] : objects) object->release(count);
  }
};
held_graph& of(cudaGraph_t g) { return *reinterpret_cast<held_graph*>(g); }

/// A capture in progress, as CUDA sees it.
struct ongoing {
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  std::unique_ptr<held_graph> made = std::make_unique<held_graph>();
};

struct captures_of_cuda {
  std::mutex lock;
  std::map<unsigned long long, ongoing> all;
};
captures_of_cuda& captures() {
  static auto* const only = new captures_of_cuda;
  return *only;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

}  // namespace

void refuse_in_captures(const char* call) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return;
  emulated::forbid_in_captures(call, [](unsigned long long id) {
    const std::lock_guard guard(captures().lock);
    const auto c = captures().all.find(id);
    if (c == captures().all.end() || c->second.mode == cudaStreamCaptureModeRelaxed) return true;
    if (c->second.thread == std::this_thread::get_id()) return false;
    return thread_mode != cudaStreamCaptureModeGlobal || c->second.mode != cudaStreamCaptureModeGlobal;
  });
}

}  // namespace emulated::cuda

using namespace emulated;
using namespace emulated::cuda;

extern "C" {

// --- streams -----------------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  return attempt([&] { *s = reinterpret_cast<cudaStream_t>(&make_stream(current_device())); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t s) {
  if (s == nullptr) return note(cudaErrorInvalidResourceHandle);
  return attempt([&] { destroy(of(s)); });
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t s) {
  bool done = false;
  if (const auto error = attempt([&] { done = idle(of(s)); })) return error;
  return done ? cudaSuccess : note(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  return attempt([&] { synchronize(of(s)); });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  return attempt([&] { wait(of(s), *of(e).mark); });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void* data) {
  return attempt([&] { enqueue(of(s), {"host function", {}, {}, [=] { function(data); }}); });
}

cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t function, void* data, unsigned) {
  return attempt([&] { enqueue(of(s), {"callback", {}, {}, [=] { function(s, cudaSuccess, data); }}); });
}

// --- events ------------------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) {
  auto made = std::make_unique<timed_event>();
  made->timed = (flags & cudaEventDisableTiming) == 0;
  *e = reinterpret_cast<cudaEvent_t>(made.release());
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete &of(e);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  return attempt([&] {
    record(*of(e).mark, of(s));
    of(e).recorded = true;
  });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
  if ((flags & cudaEventRecordExternal) != 0) return static_cast<cudaError_t>(emulated_refuse("cudaEventRecordExternal"));
  return cudaEventRecord(e, s);
}

cudaError_t cudaEventQuery(cudaEvent_t e) {
  bool done = false;
  const auto error = attempt([&] {
    refuse_in_captures("cudaEventQuery");
    done = reached(*of(e).mark);
  });
  if (error != cudaSuccess) return error;
  return done ? cudaSuccess : note(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  return attempt([&] { synchronize(*of(e).mark); });
}

cudaError_t cudaEventElapsedTime(float* time, cudaEvent_t from, cudaEvent_t to) {
  for (const auto e : {from, to})
    if (!of(e).timed || !of(e).recorded) return note(cudaErrorInvalidResourceHandle);
  for (const auto e : {from, to})
    if (const auto error = cudaEventQuery(e)) return error;
  return attempt([&] { *time = static_cast<float>(milliseconds(*of(from).mark, *of(to).mark)); });
}

// --- captures ----------------------------------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  return attempt([&] {
    begin_capture(of(s));
    const std::lock_guard guard(captures().lock);
    auto& c = captures().all[capture_id(of(s))];
    c.mode = mode;
    c.thread = std::this_thread::get_id();
    c.made->jobs = graph_of(of(s));
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  *g = nullptr;
  const auto id = capture_id(of(s));
  const auto error = attempt([&] { end_capture(of(s)); });
  if (capturing(of(s))) return error;  // the capture did not begin on this stream
  const std::lock_guard guard(captures().lock);
  const auto c = captures().all.find(id);
  if (c == captures().all.end()) return error;
  if (error == cudaSuccess) *g = reinterpret_cast<cudaGraph_t>(c->second.made.release());
  captures().all.erase(c);
  return error;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  auto& asked = of(s);
  *status = !capturing(asked)      ? cudaStreamCaptureStatusNone
            : capture_valid(asked) ? cudaStreamCaptureStatusActive
                                   : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* g,
                                     const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, size_t* count) {
  cudaStreamIsCapturing(s, status);
  const auto number = capture_id(of(s));
  if (id != nullptr) *id = number;
  if (dependencies != nullptr) *dependencies = nullptr;  // a graph runs its jobs in the order of capture
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  if (g == nullptr) return cudaSuccess;
  const std::lock_guard guard(captures().lock);
  const auto c = captures().all.find(number);
  *g = c == captures().all.end() ? nullptr : reinterpret_cast<cudaGraph_t>(c->second.made.get());
  return cudaSuccess;
}

// --- graphs ------------------------------------------------------------------------------------------------------------------

cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes != nullptr) return static_cast<cudaError_t>(emulated_refuse("cudaGraphGetNodes with nodes"));
  *count = size(*of(g).jobs);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t g, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new held_graph(of(g)));
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t g, unsigned long long flags) {
  return cudaGraphInstantiate(made, g, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s) {
  return attempt([&] { launch(reinterpret_cast<held_graph*>(g)->jobs, of(s)); });
}

cudaError_t cudaGraphDestroy(cudaGraph_t g) {
  delete &of(g);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) {
  delete reinterpret_cast<held_graph*>(g);
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void* data, cudaHostFn_t destroy, unsigned references, unsigned) {
  *made = reinterpret_cast<cudaUserObject_t>(new user_object(data, destroy, references));
  return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  reinterpret_cast<user_object*>(object)->release(count);
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t g, cudaUserObject_t object, unsigned count, unsigned flags) {
  auto* const o = reinterpret_cast<user_object*>(object);
  if ((flags & cudaGraphUserObjectMove) == 0) o->retain(count);
  of(g).objects.emplace_back(o, count);
  return cudaSuccess;
}

}  // extern "C"
