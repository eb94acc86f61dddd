// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/free_memory.hpp>

#include "../base/clock.hpp"
#include "../base/hooks.hpp"
#include "../base/views.hpp"
#include "file.hpp"
#include "home.hpp"

namespace remat::pytorch {
namespace {

/// Runs on another thread; or on the waiting thread, if the system has no thread left.
constexpr auto beside_or_later = std::launch::async | std::launch::deferred;

/// Page size in bytes. Each tensor begins at a page.
bytes_t page() {
  static const bytes_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}
bytes_t whole_pages(bytes_t bytes) { return (bytes + page() - 1) / page() * page(); }
bytes_t bytes_of(const at::Tensor& t) { return static_cast<bytes_t>(t.nbytes()); }

/// Context of the memory of a tensor on a disk.
struct part_of_file {
  std::shared_ptr<region> file;
  std::shared_ptr<disk::counts> of;  ///< counts of its disk
};
void delete_part(void* part) { delete static_cast<part_of_file*>(part); }

const part_of_file* part_of(const c10::Storage& s) {
  const auto& memory = s.data_ptr();
  return memory.get_deleter() == &delete_part ? static_cast<const part_of_file*>(memory.get_context()) : nullptr;
}
const part_of_file* part_of(const at::Tensor& t) {
  if (!t.defined() || t.layout() != at::kStrided || !t.is_cpu() || !t.has_storage()) return nullptr;
  return part_of(t.storage());
}

/// A run of whole pages of a file.
struct page_range {
  disk::counts* of;
  mapped_region* file;
  bytes_t offset, bytes;
};

/// The pages of those tensors that are on disks; adjacent runs are joined.
std::vector<page_range> page_ranges(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<char*, const at::Tensor*>> found;
  for (const auto& t : tensors)
    if (part_of(t) != nullptr && t.nbytes() > 0) found.emplace_back(static_cast<char*>(t.mutable_data_ptr()), &t);
  std::sort(found.begin(), found.end());
  std::vector<page_range> all;
  for (const auto& [begin, t] : found) {
    const auto* part = part_of(*t);
    auto* file = static_cast<mapped_region*>(part->file.get());
    const auto offset = (begin - file->data()) / page() * page(), end = begin - file->data() + bytes_of(*t);
    if (!all.empty() && all.back().file == file && all.back().offset + all.back().bytes >= offset)
      all.back().bytes = std::max(all.back().bytes, whole_pages(end) - all.back().offset);
    else
      all.push_back({part->of.get(), file, offset, whole_pages(end) - offset});
  }
  return all;
}

/// The storage of a tensor as a region.
class memory_of_caller final : public region {
 public:
  memory_of_caller(c10::Storage s, bool leaves) : storage_(std::move(s)), leaves_(leaves) {}
  char* data() const override {  // does not materialize copy-on-write storages
    return static_cast<char*>(storage_.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  }
  c10::Device on() const override { return storage_.device(); }
  bytes_t bytes() const override { return static_cast<bytes_t>(storage_.nbytes()); }

  void read(char* to, bytes_t offset, bytes_t bytes) const override {
    const auto* part = part_of(storage_);
    if (part == nullptr) return region::read(to, offset, bytes);
    auto& file = static_cast<mapped_region&>(*part->file);
    const auto begin = data() - file.data() + offset, end = begin + bytes;
    constexpr bytes_t most = 8 << 20;  // bytes per read
    const auto next = [&](bytes_t at) { return std::min(end, at / page() * page() + most); };
    if (!leaves_) file.expect(begin, bytes);
    for (auto at = begin; at < end;) {
      const auto then = next(at);
      leaves_ ? file.read_once(to + (at - begin), at, then - at) : file.read(to + (at - begin), at, then - at);
      at = then;
    }
    part->of->fetched += bytes;
  }

 private:
  c10::Storage storage_;
  bool leaves_;
};

}  // namespace

block home_of(const at::Tensor& t, bytes_t offset, bytes_t bytes, bool leaves) {
  if (!t.is_cpu())
    throw broken_contract("remat: weights are fetched from memory of the host, but one of " + std::to_string(bytes) +
                          " bytes is on " + t.device().str());
  return {std::make_shared<memory_of_caller>(t.storage(), leaves), offset, bytes};
}

std::vector<bool> tensors_to_evict(const std::vector<at::Tensor>& read) {
  std::vector<bool> leave(read.size(), false);
  if (std::none_of(read.begin(), read.end(), on_a_disk)) return leave;
  auto room = host_free() / 2;  // the other half is for the steps
  for (std::size_t i = 0; i < read.size(); ++i) {
    if (!on_a_disk(read[i])) continue;
    leave[i] = bytes_of(read[i]) > room;
    if (!leave[i]) room -= bytes_of(read[i]);
  }
  return leave;
}

copy_rates measure_fetches(device& d, link& in, const std::vector<at::Tensor>& weights) {
  const auto leave = tensors_to_evict(weights);
  const bool cold = std::find(leave.begin(), leave.end(), true) != leave.end();
  std::vector<at::Tensor> sample;
  bytes_t largest = 0, total = 0;
  for (std::size_t i = 0; i < weights.size() && total < (32 << 20); ++i) {
    if (cold && !leave[i]) continue;
    sample.push_back(weights[i]);
    largest = std::max(largest, bytes_of(weights[i]));
    total += bytes_of(weights[i]);
  }
  if (cold) disk::evict(sample);
  const auto here = d.memory().reserve(largest);
  const auto fetch = [&](const at::Tensor& t, bytes_t bytes) {
    return in.copy({here, 0, bytes}, home_of(t, byte_offset(t), bytes, cold));
  };
  const auto fetch_all = [&] {  // one after another, as in a step
    std::vector<ticket> done;
    for (const auto& t : sample) done.push_back(fetch(t, bytes_of(t)));
    for (const auto& t : done) t->wait();
  };
  if (!cold) fetch_all();  // loads the pages
  fetch(sample[0], 1)->wait();
  auto begin = clock::now();
  fetch(sample[0], 1)->wait();
  const double latency = since(begin);
  begin = clock::now();
  fetch_all();
  const bool from_disk = std::any_of(sample.begin(), sample.end(), on_a_disk);
  const auto rate = (from_disk ? 0.9 : reliable_share(d, in)) * static_cast<double>(total) / since(begin);
  return {rate, rate, latency};
}

disk::disk(const std::string& folder, bytes_t limit) : folder_(folder), files_(mapped_files(folder, limit)) {}

std::vector<at::Tensor> disk::reserve(const std::vector<at::Tensor>& like) {
  bytes_t total = 0;
  for (const auto& t : like) {
    if (t.layout() != at::kStrided || !t.is_non_overlapping_and_dense())
      throw broken_contract("remat: no tensor with gaps, or without strides, can be on a disk");
    total += whole_pages(bytes_of(t));
  }
  std::shared_ptr<region> file;
  if (total > 0) {
    if (getpid() != process_)
      throw copy_failed("the disk at " + folder_ + " belongs to the process that this one was forked from");
    auto held = files_->reserve(total);
    count_->reserved += total;
    auto* const found = held.get();
    file = {found, [held = std::move(held), total, count = count_](region*) mutable {
              held.reset();
              count->reserved -= total;
            }};
  }
  std::vector<at::Tensor> made;
  bytes_t offset = 0;
  for (const auto& t : like) {
    const auto options = at::TensorOptions(t.scalar_type());
    if (t.nbytes() == 0) {
      made.push_back(at::empty_strided(t.sizes(), t.strides(), options));
      continue;
    }
    const c10::Storage memory(c10::Storage::use_byte_size_t(), t.nbytes(),
                              c10::DataPtr(file->data() + offset, new part_of_file{file, count_}, &delete_part, c10::kCPU));
    made.push_back(at::empty({0}, options).set_(memory, 0, t.sizes(), t.strides()));
    offset += whole_pages(bytes_of(t));
  }
  return made;
}

bool disk::holds(const at::Tensor& t) const {
  const auto* part = part_of(t);
  return part != nullptr && part->of == count_;
}

void disk::write(const at::Tensor& to, const at::Tensor& value) {
  const auto* part = part_of(to);
  if (part == nullptr || !value.is_cpu() || !alike(to, value))
    throw broken_contract("remat: a tensor is written to one on a disk that differs in sizes, strides or type");
  part->file->write(static_cast<const char*>(value.const_data_ptr()),
                    static_cast<const char*>(to.const_data_ptr()) - part->file->data(), bytes_of(value));
}

void disk::take_gradient(const at::Tensor& parameter, const at::Tensor& home) {
  const accumulation_lock other_backwards_wait(parameter);
  const auto grad = gradient_of(parameter);
  if (!grad.defined() || holds(grad)) return;
  write(home, grad);
  parameter.mutable_grad() = home.detach();
}

void disk::fetch(const std::vector<at::Tensor>& tensors) {
  for (const auto& s : page_ranges(tensors)) {
    s.file->fetch(s.offset, s.bytes);
    s.of->fetched += s.bytes;
  }
}

void disk::expect(const std::vector<at::Tensor>& tensors) {
  for (const auto& s : page_ranges(tensors)) s.file->expect(s.offset, s.bytes);
}

void disk::evict(const std::vector<at::Tensor>& tensors) {
  for (const auto& s : page_ranges(tensors)) {
    s.file->evict(s.offset, s.bytes);
    s.of->evicted += s.bytes;
  }
}

bool on_a_disk(const at::Tensor& t) { return part_of(t) != nullptr; }

bool worth_fetching(const at::Tensor& t) { return on_a_disk(t) && bytes_of(t) >= 65536; }

bool alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

bool movable(const at::Tensor& t) {
  return t.defined() && t.layout() == at::kStrided && t.is_cpu() && t.has_storage() && !t.is_quantized() &&
         t.is_non_overlapping_and_dense() && bytes_of(t) >= page();
}

disk_traffic::~disk_traffic() { wait(); }

std::unique_lock<std::mutex> disk_traffic::begin() {
  std::unique_lock lock(mutex_);
  if (const auto now = getpid(); process_ != now) {
    process_ = now;
    static_cast<void>(new auto(std::exchange(coming_, {})));  // leaked: destructors would wait for threads of the parent
    static_cast<void>(new auto(std::exchange(going_, {})));
  }
  return lock;
}

void disk_traffic::ahead(key of, std::vector<at::Tensor> tensors, std::vector<at::Tensor> also) {
  const auto lock = begin();
  if (tensors.empty() || coming_.count(of) > 0) return;
  coming_[of] = std::async(beside_or_later, [list = std::move(tensors), more = std::move(also)] {
    disk::fetch(list);
    disk::expect(more);
  });
}

void disk_traffic::ready(key of, std::vector<at::Tensor> tensors) {
  ahead(of, std::move(tensors));
  const auto found = [&] {
    const auto lock = begin();
    return coming_.extract(of);
  }();
  if (found) found.mapped().get();
}

void disk_traffic::done(std::vector<at::Tensor> tensors) {
  const auto lock = begin();
  while (going_.size() > 1) collect();
  if (!tensors.empty()) going_.push_back(std::async(beside_or_later, [list = std::move(tensors)] { disk::evict(list); }));
}

void disk_traffic::collect() {
  auto oldest = std::move(going_.front());
  going_.pop_front();
  try {
    oldest.get();
  } catch (const copy_failed&) {
    if (!failure_) failure_ = std::current_exception();
  }
}

void disk_traffic::wait() {
  const auto lock = begin();
  for (const auto& [of, fetched] : coming_) fetched.wait();
  while (!going_.empty()) collect();
}

void disk_traffic::drain() {
  const auto lock = begin();
  while (!going_.empty()) collect();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace remat::pytorch
