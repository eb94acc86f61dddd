// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include <remat/pytorch/disk.hpp>

#include "file.hpp"

namespace remat::pytorch {
namespace {

/// Bytes of a page: tensors begin with one.
bytes_t page() {
  static const bytes_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}
bytes_t whole_pages(bytes_t bytes) { return (bytes + page() - 1) / page() * page(); }
bytes_t bytes_of(const at::Tensor& t) { return static_cast<bytes_t>(t.nbytes()); }

/// What the memory of a tensor on a disk belongs to.
struct part_of_file {
  std::shared_ptr<region> file;
  std::shared_ptr<disk::counts> of;  ///< its disk
};
void let_go(void* part) { delete static_cast<part_of_file*>(part); }

const part_of_file* part_of(const at::Tensor& t) {
  if (!t.defined() || t.layout() != at::kStrided || !t.is_cpu() || !t.has_storage()) return nullptr;
  const auto& memory = t.storage().data_ptr();
  return memory.get_deleter() == &let_go ? static_cast<const part_of_file*>(memory.get_context()) : nullptr;
}

/// Whole pages of a file.
struct stretch {
  disk::counts* of;
  mapped_region* file;
  bytes_t offset, bytes;
};

/// Those of tensors on disks; neighbours are one.
std::vector<stretch> stretches(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<char*, const at::Tensor*>> found;
  for (const auto& t : tensors)
    if (part_of(t) != nullptr && t.nbytes() > 0) found.emplace_back(static_cast<char*>(t.mutable_data_ptr()), &t);
  std::sort(found.begin(), found.end());
  std::vector<stretch> all;
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

}  // namespace

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
                              c10::DataPtr(file->data() + offset, new part_of_file{file, count_}, &let_go, c10::kCPU));
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

void disk::fetch(const std::vector<at::Tensor>& tensors) {
  for (const auto& s : stretches(tensors)) {
    s.file->fetch(s.offset, s.bytes);
    s.of->fetched += s.bytes;
  }
}

void disk::expect(const std::vector<at::Tensor>& tensors) {
  for (const auto& s : stretches(tensors)) s.file->expect(s.offset, s.bytes);
}

void disk::evict(const std::vector<at::Tensor>& tensors) {
  for (const auto& s : stretches(tensors)) {
    s.file->evict(s.offset, s.bytes);
    s.of->evicted += s.bytes;
  }
}

bool on_a_disk(const at::Tensor& t) { return part_of(t) != nullptr; }

bool alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

bool movable(const at::Tensor& t) {
  return t.defined() && t.layout() == at::kStrided && t.is_cpu() && t.has_storage() && !t.is_quantized() &&
         t.is_non_overlapping_and_dense() && bytes_of(t) >= page();
}

disk_traffic::~disk_traffic() { wait(); }

void disk_traffic::ahead(key of, std::vector<at::Tensor> tensors, std::vector<at::Tensor> also) {
  if (tensors.empty() || coming_.count(of) > 0) return;
  coming_[of] = std::async(std::launch::async, [list = std::move(tensors), more = std::move(also)] {
    disk::fetch(list);
    disk::expect(more);
  });
}

void disk_traffic::ready(key of, std::vector<at::Tensor> tensors) {
  ahead(of, std::move(tensors));
  if (auto found = coming_.extract(of)) found.mapped().get();
}

void disk_traffic::done(std::vector<at::Tensor> tensors) {
  while (going_.size() > 1) collect();
  if (!tensors.empty()) going_.push_back(std::async(std::launch::async, [list = std::move(tensors)] { disk::evict(list); }));
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
  for (const auto& [of, fetched] : coming_) fetched.wait();
  while (!going_.empty()) collect();
}

void disk_traffic::drain() {
  while (!going_.empty()) collect();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace remat::pytorch
