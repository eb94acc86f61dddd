// SPDX-License-Identifier: Apache-2.0
/// @file
/// The hardware under both emulated devices: memory that the host cannot touch, streams, events, copies, captured graphs, and a
/// detector of races. It knows neither PyTorch nor CUDA.
///
/// The accelerator (`accelerator.cpp`) and the CUDA runtime (`cuda_runtime.cpp`) are two interfaces to it. A process uses one.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulated {

constexpr int device_count = 2;
constexpr std::size_t allocation_alignment = 512;  ///< of every `allocate`, bytes

/// A call that the hardware refuses; the interfaces turn it into an error of theirs.
struct failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct out_of_memory : failure {
  using failure::failure;
};
/// The call is not allowed while a stream is captured.
struct capture_error : failure {
  enum class why { forbidden, invalid, unjoined, other_capture, outside, default_stream, captured_event };
  explicit capture_error(const std::string& text, why which = why::forbidden) : failure(text), reason(which) {}
  why reason;
};

/// What a test can make the hardware do. Read from EMULATED_<NAME> in capitals at the start; `set` changes one at any time.
///   late              a job begins up to this many microseconds late, by chance, and its results appear when it ends
///   fail              the n-th job from now on fails (1: the next); 0: none does
///   hold              the n-th copy between host and device from now on (1: the next) and those behind it wait until this is 0
///   drop_waits        1: streams ignore waits for events (a mutation that tests must catch)
///   wrong_stream      1: events are recorded on another stream (a mutation)
///   alignment         matrix products give other last bits if an operand does not lie at a multiple of it; 0: they never do
///   workspace         bytes that each thread allocates at its first matrix product, and keeps
///   bytes             memory of each device
///   pace              bytes per second that a kernel can read and write: it takes no less time; 0: what the host takes
///   link              bytes per second of copies between host and device, each way; 0: copies take no time
///   interference      per mille by which a kernel takes longer while a copy runs
///   clock             events tell times that are so many times longer; 0: as they are
///   handles           1: what the accelerator allocates are handles: a tensor's memory begins at one, and nobody can stand in
///   front
///                     of its allocator; to be set at the start
///   lost              1: every call fails, as on a device that is lost
namespace option {
void set(const std::string& name, long value);
long get(const std::string& name);
}  // namespace option

// --- memory ------------------------------------------------------------------------------------------------------------------

/// Addresses of the device. The host crashes when it touches them.
/// @throws out_of_memory
void* allocate(int device, std::size_t bytes);
/// Waits for all jobs of the device first.
void release(void* data);
/// Page-locked memory of the host.
void* allocate_pinned(std::size_t bytes);
void release_pinned(void* data);
/// Memory that the host has counts as page-locked until `unregister_pinned`.
void register_pinned(void* data, std::size_t bytes);
void unregister_pinned(void* data);

int device_of(const void* p);   ///< -1: no address of a device
bool is_handle(const void* p);  ///< `allocate` gave it
bool is_pinned(const void* p);
/// Where a kernel finds what is at the address of a device; other addresses stay as they are.
char* kernel_address(const void* p);
bool is_kernel_address(const void* p);
void* device_address(const void* kernel_address);  ///< the inverse
std::size_t used_bytes(int device);                ///< allocated, and taken by others
std::size_t total_bytes(int device);
/// Another process takes so much of the device's memory from now on.
void take_for_others(int device, std::size_t bytes);

// --- work --------------------------------------------------------------------------------------------------------------------

struct range {
  const void* begin;  ///< an address of a device or of the host
  std::size_t bytes;
};

/// What a stream does, in order.
struct job {
  std::string name;
  std::vector<range> reads, writes;
  std::function<void()> run;  ///< on the thread of the stream; again at each replay if it has been captured
  bool copies = false;        ///< between the host and a device: takes the time of the link
};

/// A thread with a queue. Jobs of different streams run in any order that events allow.
class stream;
stream& default_stream(int device);
/// It lives until `destroy`.
stream& make_stream(int device);
void destroy(stream& s);
int device_of(const stream& s);

/// Adds a job. Reports a race if the order of streams, events and host waits does not put it after all jobs that write what it
/// reads or writes, and after those that read what it writes. A stream that is captured keeps the job for the graph.
/// @throws failure if an earlier job of the stream has failed
void enqueue(stream& s, job j);
bool idle(const stream& s);   ///< @throws capture_error
void synchronize(stream& s);  ///< @throws failure, capture_error
void synchronize_device(int device);

class event;
std::shared_ptr<event> make_event();
void record(event& e, stream& s);
void wait(stream& s, const event& e);                     ///< what comes later in `s` runs after it
bool reached(const event& e);                             ///< never recorded: true
void synchronize(const event& e);                         ///< @throws failure, capture_error
double milliseconds(const event& from, const event& to);  ///< both reached

/// Copies in `s`; ranges of the host that are not page-locked are read at once, and written before it returns, as CUDA does.
void copy(void* to, const void* from, std::size_t bytes, stream& s);
void fill(void* to, int value, std::size_t bytes, stream& s);

// --- graphs ------------------------------------------------------------------------------------------------------------------

/// Jobs that were captured instead of run.
class graph;
/// Other streams join when they wait for an event of a captured one.
/// @throws capture_error for a default stream, and for one that is captured already
void begin_capture(stream& s);
/// @throws capture_error if a stream that joined has not been joined back, or a call made the capture invalid
std::shared_ptr<graph> end_capture(stream& s);
bool capturing(const stream& s);
bool capturing_device(int device);                 ///< one of its streams is captured
unsigned long long capture_id(const stream& s);    ///< 0: not captured
bool capture_valid(const stream& s);               ///< false: a call made the capture invalid
std::shared_ptr<graph> graph_of(const stream& s);  ///< what has been captured so far; null: not captured
/// Makes all captures invalid that `exempt` does not cover: the caller does what a capture forbids.
/// @throws capture_error if there was one
void forbid_in_captures(const char* call, const std::function<bool(unsigned long long capture)>& exempt = {});
/// Runs all jobs of the graph, in the order of capture, as one job of `s`.
void launch(const std::shared_ptr<graph>& g, stream& s);
std::size_t size(const graph& g);  ///< jobs

// --- what happened -----------------------------------------------------------------------------------------------------------

struct counts {
  long jobs = 0, copies = 0, races = 0, allocations = 0;
};
counts counted();
void reset_counts();
/// Streams with a failed job work again.
void clear_failures();
std::vector<std::string> race_reports();  ///< at most 100: the two jobs, their streams and the bytes

}  // namespace emulated
