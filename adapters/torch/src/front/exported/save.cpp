// SPDX-License-Identifier: Apache-2.0
#include "save.hpp"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <map>
#include <ostream>
#include <set>
#include <tuple>

#include <remat/io/file.hpp>
#include <remat/pytorch/exported_program.hpp>

namespace remat::pytorch {
namespace {

using caffe2::serialize::PyTorchStreamWriter;

/// Writes a ZIP archive. Readers see the old file or the whole new one.
/// @param version of the file format; it decides where PyTorch puts its own records
template <class Put>
void write_archive(const std::string& path, uint64_t version, const Put& put) {
  write_file(path, [&](std::ostream& out) {
    // Always reports success, because the writer's destructor writes, too. The stream remembers a failure.
    PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
      out.write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
      return size;
    });
    writer.setMinVersion(version);
    put(writer);
    writer.writeEndOfFile();
  });
}

/// The bytes of a storage as it was read, with the current content of the tensors in it.
at::Tensor bytes_now(const std::vector<const exported::stored_tensor*>& tensors, at::DataPtr was, std::size_t size) {
  const c10::NoGradGuard no_grad;
  const at::Storage storage(at::Storage::use_byte_size_t{}, static_cast<int64_t>(size), std::move(was), nullptr, false);
  for (const auto* t : tensors) {
    if (t->tensor.scalar_type() != t->type || t->tensor.sizes() != at::IntArrayRef(t->sizes))
      throw error("'" + t->name + "' has another size or type than in the archive");
    at::empty({0}, at::TensorOptions().dtype(t->type)).set_(storage, t->offset, t->sizes, t->strides).copy_(t->tensor);
  }
  return at::empty({0}, at::kByte).set_(storage, 0, {static_cast<int64_t>(size)}, {1});
}

const char* safetensors_type(const named_tensor& n) {
  switch (n.tensor.scalar_type()) {
    case at::kDouble:
      return "F64";
    case at::kFloat:
      return "F32";
    case at::kHalf:
      return "F16";
    case at::kBFloat16:
      return "BF16";
    case at::kLong:
      return "I64";
    case at::kInt:
      return "I32";
    case at::kShort:
      return "I16";
    case at::kChar:
      return "I8";
    case at::kByte:
      return "U8";
    case at::kUInt16:
      return "U16";
    case at::kUInt32:
      return "U32";
    case at::kUInt64:
      return "U64";
    case at::kBool:
      return "BOOL";
    case at::kComplexFloat:
      return "C64";
    case at::kFloat8_e4m3fn:
      return "F8_E4M3";
    case at::kFloat8_e5m2:
      return "F8_E5M2";
    default:
      throw error("safetensors: '" + n.name + "' is of type " + c10::toString(n.tensor.scalar_type()) +
                  ", which it does not know");
  }
}

}  // namespace

void exported::save(const std::string& path, const archive& from) {
  std::map<std::string, std::vector<const stored_tensor*>> changed;
  for (const auto* list : {&from.weights(), &from.constants()})
    for (const auto& t : *list) changed[t.record].push_back(&t);
  // Since format 6, the record .data/version replaces version.
  write_archive(path, 6, [&](PyTorchStreamWriter& writer) {
    for (const auto& record : from.records()) {
      if (record == ".data/version" || record == ".data/serialization_id" || record == "version") continue;  // the writer's own
      auto [data, size] = from.read(record);
      const auto found = changed.find(record);
      if (found == changed.end()) {
        writer.writeRecord(record, data.get(), size);
      } else {
        const auto now = bytes_now(found->second, std::move(data), size);
        writer.writeRecord(record, now.const_data_ptr(), now.nbytes());
      }
    }
  });
}

void save_state_dict(const std::string& path, const std::vector<named_tensor>& tensors) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::TensorType::get());
  for (const auto& n : tensors) {
    if (!n.tensor.defined() || !n.tensor.has_storage()) throw error("'" + n.name + "' has no memory");
    dict.insert(n.name, n.tensor.detach());
  }
  std::string pickled;
  std::map<const void*, std::string> numbers;
  std::vector<at::Tensor> storages;
  ::torch::jit::Pickler pickler(
      [&](const char* data, std::size_t size) { pickled.append(data, size); }, nullptr, nullptr, nullptr,
      [&](const at::Tensor& t) {  // one record per storage: tied weights stay tied
        const auto [at, fresh] = numbers.emplace(t.storage().unsafeGetStorageImpl(), std::to_string(numbers.size()));
        if (fresh) storages.push_back(t);
        return at->second;
      },
      /*tag_aggregates=*/false);  // weights_only refuses tags
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();
  write_archive(path, 3, [&](PyTorchStreamWriter& writer) {
    writer.writeRecord("data.pkl", pickled.data(), pickled.size());
    writer.writeRecord("byteorder", "little", 6);
    for (std::size_t i = 0; i < storages.size(); ++i) {
      const auto data = ::torch::jit::getWriteableTensorData(storages[i]);
      writer.writeRecord("data/" + std::to_string(i), data.data(), data.sizeInBytes());
    }
  });
}

void save_safetensors(const std::string& path, const std::vector<named_tensor>& tensors) {
  auto header = nlohmann::ordered_json::object(), metadata = nlohmann::ordered_json::object();
  metadata["format"] = "pt";
  std::map<std::tuple<const void*, at::ScalarType, std::vector<int64_t>, std::vector<int64_t>, int64_t>, std::string> seen;
  std::set<std::string> names = {"__metadata__"};
  std::vector<at::Tensor> kept;
  std::size_t end = 0;
  for (const auto& n : tensors) {
    const auto& t = n.tensor;
    if (!t.defined() || !t.has_storage()) throw error("'" + n.name + "' has no memory");
    if (!names.insert(n.name).second) throw error("safetensors: two tensors cannot have the name '" + n.name + "'");
    const auto [same, fresh] = seen.try_emplace(
        {t.storage().unsafeGetStorageImpl(), t.scalar_type(), t.sizes().vec(), t.strides().vec(), t.storage_offset()}, n.name);
    if (!fresh) {
      metadata[n.name] = same->second;
      continue;
    }
    const auto begin = end;
    end += t.numel() * t.element_size();
    header[n.name] = {{"dtype", safetensors_type(n)}, {"shape", t.sizes().vec()}, {"data_offsets", {begin, end}}};
    kept.push_back(t.detach());
  }
  header["__metadata__"] = metadata;
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    throw error("safetensors: a name is not valid UTF-8");
  }
  text.append((8 - text.size() % 8) % 8, ' ');
  write_file(path, [&](std::ostream& out) {
    for (auto size = static_cast<uint64_t>(text.size()), i = uint64_t{0}; i < 8; ++i, size >>= 8)
      out.put(static_cast<char>(size & 0xff));
    out << text;
    for (const auto& k : kept) {
      const auto t = k.cpu().contiguous();
      out.write(static_cast<const char*>(t.const_data_ptr()), static_cast<std::streamsize>(t.nbytes()));
    }
  });
}

}  // namespace remat::pytorch
