// Messages between rank 0 of a worker and the other ranks, over a socket pair. Both ends are the same program, so
// values travel as they are in memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "pipeline/engine.h"
#include "shared/core/result.h"

namespace ditfleet::worker {

enum class Call : std::uint8_t { kCreate, kLoad, kEncode, kDenoise, kRelease, kPrefetch, kPin, kForget };
std::string_view name_of(Call call);

struct Message {
  Call call = Call::kCreate;
  std::int64_t model = 0, generation = 0;
  std::string bytes = {};  // packed() arguments, or an optional Error as a reply
  std::int64_t id = 0;     // repeated in the reply
};

// Blocks. kUnavailable: the other end has closed the socket, or the process has ended.
Result<void> send_message(int socket, const Message& message);
Result<Message> receive_message(int socket);

// describe(archive, value) passes the members of a structure to an archive, which writes or reads them.
template <class Archive>
void describe(Archive& archive, pipeline::LoraRequest& v) {
  archive(v.path, v.scale, v.id, v.expert, v.name);
}
template <class Archive>
void describe(Archive& archive, pipeline::AdapterDrops& v) {
  archive(v.from_host, v.from_slots);
}
template <class Archive>
void describe(Archive& archive, pipeline::Media& v) {
  archive(v.width, v.height, v.frames, v.frame_rate, v.rgb);
}
template <class Archive>
void describe(Archive& archive, pipeline::ModelSource& v) {
  archive(v.name, v.dir, v.files, v.quantize, v.vae_dtype, v.attention);
}
template <class Archive>
void describe(Archive& archive, Error& v) {
  archive(v.code, v.message, v.param, v.kind);
}
template <class T, class Archive>
void describe_field(Archive& archive, job::FieldValues& v, job::Field field) {
  const auto* known = v.find(field);
  std::optional<T> value = known ? std::optional(std::get<T>(*known)) : std::nullopt;
  archive(value);
  if (value && !known) v.set(field, std::move(*value));
}
template <class Archive>
void describe(Archive& archive, job::FieldValues& v) {
  for (const job::Field field : job::kFields) {
    if (field.row().use != job::FieldUse::kGeneration) continue;
    switch (field.row().type) {
      case job::FieldType::kInteger:
      case job::FieldType::kFlag: describe_field<std::int64_t>(archive, v, field); break;
      case job::FieldType::kReal:
      case job::FieldType::kCache: describe_field<double>(archive, v, field); break;
      default: describe_field<std::string>(archive, v, field);
    }
  }
}
template <class Archive>
void describe(Archive& archive, pipeline::GenerationRequest& v) {
  std::vector<pipeline::Media> images;
  for (const auto& image : v.images) images.push_back(*image);
  std::optional<pipeline::Media> mask = v.mask ? std::optional(*v.mask) : std::nullopt;
  archive(v.prompt, v.fields, v.seed, v.number, v.loras, images, mask, v.alone);
  if (v.images.empty())
    for (auto& image : images) v.images.push_back(std::make_shared<const pipeline::Media>(std::move(image)));
  if (mask && !v.mask) v.mask = std::make_shared<const pipeline::Media>(std::move(*mask));
}

class Writer {
 public:
  template <class... T>
  void operator()(const T&... values) {
    (put(values), ...);
  }
  std::string bytes;

 private:
  template <class T>
  void put(const T& v) {
    if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
      bytes.append(reinterpret_cast<const char*>(&v), sizeof v);
    } else if constexpr (requires { v.has_value(); }) {
      put(v.has_value());
      if (v) put(*v);
    } else if constexpr (requires { v.first, v.second; }) {
      put(v.first);
      put(v.second);
    } else if constexpr (requires { v.begin(); }) {
      put(v.size());
      if constexpr (requires {
                      v.data();
                      std::enable_if_t<sizeof(*v.data()) == 1>();
                    })
        bytes.append(reinterpret_cast<const char*>(v.data()), v.size());
      else
        for (const auto& one : v) put(one);
    } else {
      describe(*this, const_cast<T&>(v));  // which only reads it
    }
  }
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  template <class... T>
  void operator()(T&... values) {
    (get(values), ...);
  }
  bool complete() const { return complete_; }  // there were enough bytes, and each bool was one

 private:
  std::string_view take(std::size_t size) {
    complete_ = complete_ && size <= rest_.size();
    const std::string_view taken = rest_.substr(0, complete_ ? size : 0);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  template <class T>
  void get(T& v) {
    if constexpr (std::is_same_v<T, bool>) {
      std::uint8_t byte = 0;
      get(byte);
      complete_ = complete_ && byte <= 1;
      v = byte == 1;
    } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
      if (const auto taken = take(sizeof v); taken.size() == sizeof v) std::memcpy(&v, taken.data(), sizeof v);
    } else if constexpr (requires { v.has_value(); }) {
      bool has = false;
      get(has);
      if (has) get(v.emplace());
    } else if constexpr (requires {
                           v.data();
                           std::enable_if_t<sizeof(*v.data()) == 1>();
                         }) {
      std::size_t size = 0;
      get(size);
      const auto taken = take(size);
      v.assign(taken.begin(), taken.end());
    } else if constexpr (requires { v.begin(); }) {
      std::size_t size = 0;
      get(size);
      for (; size > 0 && complete_; --size) get_into(v);
    } else {
      describe(*this, v);
    }
  }
  template <class T>
  void get_into(T& container) {
    if constexpr (requires { typename T::mapped_type; }) {
      std::pair<typename T::key_type, typename T::mapped_type> one;
      get(one.first);
      get(one.second);
      container.insert(std::move(one));
    } else {
      typename T::value_type one{};
      get(one);
      container.insert(container.end(), std::move(one));
    }
  }

  std::string_view rest_;
  bool complete_ = true;
};

template <class... T>
std::string packed(const T&... values) {
  Writer writer;
  writer(values...);
  return std::move(writer.bytes);
}
// Returns false if the bytes end too early or cannot be what packed() made of the same types. Bytes that follow are
// ignored.
template <class... T>
bool unpack(std::string_view bytes, T&... values) {
  Reader reader(bytes);
  reader(values...);
  return reader.complete();
}

}  // namespace ditfleet::worker
