// SPDX-License-Identifier: Apache-2.0
#include "archive.hpp"

#include <ATen/ATen.h>

#include <array>
#include <tuple>

#include <remat/pytorch/exported_program.hpp>

namespace remat::pytorch::exported {
namespace {

constexpr int64_t schema_major = 8;

/// Runs `act`, and reports errors of PyTorch as faults of the document.
template <class Act>
auto reading(const std::string& place, const Act& act) {
  try {
    return act();
  } catch (const c10::Error& why) {
    throw bad_document(place + ": " + why.what_without_backtrace());
  } catch (const std::logic_error& why) {  // a bad number in a record of PyTorch
    throw bad_document(place + ": " + why.what());
  }
}

/// Bytes from the beginning of the storage to the end of the tensor.
/// @throws bad_document if the sizes are invalid or too large
std::size_t extent(const stored_tensor& t, const field& f) {
  if (t.sizes.size() != t.strides.size()) f.fail("as many strides as sizes are needed");
  int64_t last = t.offset, elements = 1;
  bool overflow = false;
  for (std::size_t i = 0; i < t.sizes.size(); ++i) {
    int64_t step = 0;
    if (t.sizes[i] < 0 || t.strides[i] < 0) f.fail("a size or stride is negative");
    overflow |= __builtin_mul_overflow(elements, t.sizes[i], &elements);
    overflow |= t.sizes[i] > 0 && __builtin_mul_overflow(t.sizes[i] - 1, t.strides[i], &step);
    overflow |= __builtin_add_overflow(last, step, &last);
  }
  if (t.offset < 0) f.fail("the storage offset is negative");
  int64_t bytes = 0;
  overflow |= __builtin_add_overflow(last, elements == 0 ? 0 : 1, &last);
  overflow |= __builtin_mul_overflow(last, static_cast<int64_t>(c10::elementSize(t.type)), &bytes);
  if (overflow) f.fail("the tensor is larger than any memory");
  return static_cast<std::size_t>(bytes);
}

std::vector<int64_t> stored_sizes(const field& f) {
  std::vector<int64_t> all;
  for (const auto& x : f.elements()) all.push_back(x.at("as_int").integer());
  return all;
}

}  // namespace

at::ScalarType scalar_type(const field& f) {
  using enum at::ScalarType;
  static const std::map<int64_t, at::ScalarType> types = {{1, Byte},
                                                          {2, Char},
                                                          {3, Short},
                                                          {4, Int},
                                                          {5, Long},
                                                          {6, Half},
                                                          {7, Float},
                                                          {8, Double},
                                                          {9, ComplexHalf},
                                                          {10, ComplexFloat},
                                                          {11, ComplexDouble},
                                                          {12, Bool},
                                                          {13, BFloat16},
                                                          {28, UInt16},
                                                          {29, Float8_e4m3fn},
                                                          {30, Float8_e5m2},
                                                          {31, Float8_e4m3fnuz},
                                                          {32, Float8_e5m2fnuz},
                                                          {33, Float8_e8m0fnu},
                                                          {34, UInt32},
                                                          {35, UInt64}};
  const auto found = types.find(f.integer());
  if (found == types.end()) f.fail("no scalar type has the number " + std::to_string(f.integer()));
  return found->second;
}

at::Layout layout(const field& f) {
  static const std::array layouts = {at::kSparse,    at::kSparseCsr, at::kSparseCsc, at::kSparseBsr,
                                     at::kSparseBsc, at::kMkldnn,    at::kStrided};
  const auto n = f.integer();
  if (n < 1 || n > static_cast<int64_t>(layouts.size())) f.fail("no layout has the number " + std::to_string(n));
  return layouts[static_cast<std::size_t>(n - 1)];
}

at::MemoryFormat memory_format(const field& f) {
  static const std::array formats = {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast,
                                     at::MemoryFormat::ChannelsLast3d, at::MemoryFormat::Preserve};
  const auto n = f.integer();
  if (n < 1 || n > static_cast<int64_t>(formats.size())) f.fail("no memory format has the number " + std::to_string(n));
  return formats[static_cast<std::size_t>(n - 1)];
}

at::Device device(const field& f) {
  auto name = f.at("type").text();
  if (const auto index = f.find("index"); index && !index->is_null()) name += ":" + std::to_string(index->integer());
  return reading(f.place(), [&] { return at::Device(name); });
}

archive::archive(const std::string& path, const std::string& model, std::optional<at::Device> device)
    : path_(path), model_(model) {
  reader_ = reading(path, [&] { return std::make_unique<caffe2::serialize::PyTorchStreamReader>(path); });
  const auto text = [&](const std::string& record) {
    const auto [data, size] = read(record);
    return std::string(static_cast<const char*>(data.get()), size);
  };
  if (reader_->hasRecord("serialized_exported_program.json"))
    throw bad_document(path + ": written by an old torch.export; load it in Python and save it again");
  if (text("archive_format") != "pt2") throw bad_document(place("archive_format") + ": not pt2");
  if (reader_->hasRecord("byteorder") && text("byteorder") != "little")
    throw bad_document(place("byteorder") + ": only little is known");
  program_ = parse("models/" + model + ".json");
  const auto major = program().at("schema_version").at("major");
  if (major.integer() != schema_major)
    major.fail("schema " + std::to_string(major.integer()) + "; only " + std::to_string(schema_major) + " is known");
  weights_ = tensors("data/weights/", model + "_weights_config.json", device);
  constants_ = tensors("data/constants/", model + "_constants_config.json", device);
}

std::pair<at::DataPtr, std::size_t> archive::read(const std::string& record) const {
  return reading(place(record), [&] {
    if (!reader_->hasRecord(record)) throw bad_document(place(record) + ": missing");
    auto [data, size] = reader_->getRecord(record);
    return std::pair(std::move(data), size);
  });
}

std::vector<std::string> archive::records() const {
  return reading(path_, [&] { return reader_->getAllRecords(); });
}

field::json archive::parse(const std::string& record) const {
  const auto [data, size] = read(record);
  const auto* begin = static_cast<const char*>(data.get());
  try {
    return field::json::parse(begin, begin + size);
  } catch (const nlohmann::json::exception& why) {
    throw bad_document(place(record) + ": " + why.what());
  }
}

std::vector<stored_tensor> archive::tensors(const std::string& folder, const std::string& config,
                                            std::optional<at::Device> device) {
  const auto document = parse(folder + config);
  const field root(document, place(folder + config));
  std::vector<stored_tensor> all;
  std::vector<std::string> objects;
  std::map<std::pair<std::string, std::string>, at::Storage> storages;  // by record and device
  std::map<std::tuple<std::string, bool, bool, at::ScalarType, std::vector<int64_t>, std::vector<int64_t>, int64_t>, at::Tensor>
      tied;
  for (const auto& [name, f] : root.at("config").members()) {
    if (f.at("use_pickle").boolean()) {
      objects.push_back("'" + name + "' is " + (f.at("tensor_meta").is_null() ? "an object" : "a tensor subclass"));
      continue;
    }
    const auto meta = f.at("tensor_meta");
    if (exported::layout(meta.at("layout")) != at::kStrided) {
      objects.push_back("'" + name + "' is not a dense tensor");
      continue;
    }
    stored_tensor t{.name = name,
                    .record = folder + f.at("path_name").text(),
                    .parameter = f.at("is_param").boolean(),
                    .requires_grad = meta.at("requires_grad").boolean(),
                    .type = scalar_type(meta.at("dtype")),
                    .sizes = stored_sizes(meta.at("sizes")),
                    .strides = stored_sizes(meta.at("strides")),
                    .offset = meta.at("storage_offset").at("as_int").integer(),
                    .device = device ? *device : exported::device(meta.at("device")),
                    .tensor = {}};
    if (t.requires_grad && !at::isFloatingType(t.type) && !at::isComplexType(t.type))
      meta.at("requires_grad").fail("true, but tensors of " + std::string(c10::toString(t.type)) + " have no gradient");
    auto& storage = storages[{t.record, t.device.str()}];
    if (!storage) {
      auto [data, size] = read(t.record);
      storage = at::Storage(at::Storage::use_byte_size_t{}, static_cast<int64_t>(size), std::move(data), nullptr, false);
      if (!t.device.is_cpu()) try {
          const auto bytes = at::empty({0}, at::kByte).set_(storage, 0, {static_cast<int64_t>(size)}, {1});
          storage = bytes.to(t.device).storage();
        } catch (const c10::Error& why) {
          throw not_available(meta.place() + ": '" + name + "' cannot be put on " + t.device.str() +
                              " (see load_options::device): " + why.what_without_backtrace());
        }
    }
    if (const auto needed = extent(t, meta); needed > storage.nbytes())
      meta.fail("the tensor ends at byte " + std::to_string(needed) + ", " + t.record + " has " +
                std::to_string(storage.nbytes()));
    auto& same = tied[{t.record, t.parameter, t.requires_grad, t.type, t.sizes, t.strides, t.offset}];
    if (!same.defined()) {
      same = at::empty({0}, at::TensorOptions().dtype(t.type).device(t.device)).set_(storage, t.offset, t.sizes, t.strides);
      same.requires_grad_(t.requires_grad);
    }
    t.tensor = same;
    all.push_back(std::move(t));
  }
  if (!objects.empty()) {
    auto what = root.place() + ": only plain tensors can be read:";
    for (const auto& o : objects) what += "\n  " + o;
    throw unsupported_program(what, std::move(objects));
  }
  return all;
}

}  // namespace remat::pytorch::exported
