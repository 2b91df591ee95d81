// The table of the fields of a job's spec, one row per field. The JSON reader and writer, the validation, the command
// line and the OpenAPI schema use the table.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace ditfleet::job {

// kImage: the SHA-256 of a stored image (results/store.h), 64 lower-case hexadecimal digits. Over HTTP, the image
// itself may take its place. The value of "image" has the SHA-256 of each image of "images", separated by commas.
// kImages: an array of these. kFlag: true or false; the value is 1 or 0. kCache: an object with a mode, and with a
// threshold that is the value; 0 means off. kWebhook: a URL, or an object with it and the names of events.
enum class FieldType { kText, kInteger, kReal, kFlag, kFormat, kSize, kAdapters, kImage, kImages, kCache, kWebhook };

// Model families read generation fields. Their values are in FieldValues, and each model's entry in the catalogue lists
// the fields that apply. The other fields are members of JobSpec (spec.h).
enum class FieldUse { kJob, kGeneration };

struct FieldRow {
  std::string_view name;  // in JSON
  FieldType type;
  FieldUse use;
  // Inclusive bounds: of a number, of the bytes of a text, or of the entries of an array. A model may have narrower
  // bounds.
  std::int64_t low, high;
  std::string_view flag;         // of the `generate` commands; empty: the commands have no flag for the field
  std::string_view description;  // one or two sentences, with the unit
};

inline constexpr std::int64_t kMaxNameBytes = 128;
inline constexpr std::int64_t kMaxTextBytes = 16 << 10;
// Combining marks in a row, in any text (Unicode's stream-safe limit). Normalizing a longer run takes quadratic time.
inline constexpr std::size_t kMaxMarks = 30;
inline constexpr std::int64_t kMaxSide = 16384;
inline constexpr std::int64_t kMaxImages = 4;
inline constexpr double kMaxLoraScale = 100.0;  // largest absolute value
inline constexpr double kLeastCacheThreshold = 0.001;
inline constexpr std::size_t kMaxUrlBytes = 2048;

// Which transformers an adapter changes, in a model that has one for high and one for low noise levels.
enum class Expert { kBoth, kHigh, kLow };
std::string_view expert_name(Expert expert);  // "both", "high" or "low"
std::optional<Expert> find_expert(std::string_view name);

// In the order of the canonical JSON.
inline constexpr auto kFieldRows = std::to_array<FieldRow>({
    {"model", FieldType::kText, FieldUse::kJob, 0, kMaxNameBytes, "",
     "One of /v1/models; the default model if left out."},
    {"preset", FieldType::kText, FieldUse::kJob, 0, kMaxNameBytes, "--preset",
     "One of the model's presets (see /v1/models). It sets the fields that the request leaves out, and adds adapters."},
    {"prompt", FieldType::kText, FieldUse::kJob, 0, kMaxTextBytes, "--prompt",
     "What the image should show; may be empty. At most 16 KiB and 30 combining marks in a row."},
    {"negative_prompt", FieldType::kText, FieldUse::kGeneration, 0, kMaxTextBytes, "--negative",
     "What the image should not show; takes effect with classifier-free guidance. \"\" counts as given."},
    {"image", FieldType::kImage, FieldUse::kGeneration, 1, kMaxImages, "--image",
     "Picture that is edited or referred to, or that the video begins with: PNG, JPEG, WebP, BMP or GIF, by the id of "
     "POST /v1/uploads, or in base64, perhaps as a data URL."},
    {"images", FieldType::kImages, FieldUse::kJob, 1, kMaxImages, "",
     "Several pictures instead of image, in order. Of a video: the first and the last frame."},
    {"mask", FieldType::kImage, FieldUse::kGeneration, 1, 1, "--mask",
     "Picture that says which part of image is replaced, as image: the transparent part, or without transparency the "
     "white one."},
    {"strength", FieldType::kReal, FieldUse::kGeneration, 0, 1, "--strength",
     "How much of image is replaced: the part of the denoising steps that run, above 0. 1 ignores the picture."},
    {"auto_resize", FieldType::kFlag, FieldUse::kGeneration, 0, 1, "--no-auto-resize",
     "Whether a model with preferred sizes resizes image to the nearest one; true if left out."},
    {"n", FieldType::kInteger, FieldUse::kJob, 1, 64, "-n", "Number of images; 1 if left out."},
    {"width", FieldType::kInteger, FieldUse::kGeneration, 1, kMaxSide, "", "Pixels."},
    {"height", FieldType::kInteger, FieldUse::kGeneration, 1, kMaxSide, "", "Pixels."},
    {"size", FieldType::kSize, FieldUse::kJob, 0, 32, "--size",
     "WIDTHxHEIGHT in pixels instead of width and height, or auto: the model's default."},
    {"frames", FieldType::kInteger, FieldUse::kGeneration, 1, 1024, "--frames", "Number of frames of a video."},
    {"fps", FieldType::kReal, FieldUse::kGeneration, 1, 240, "--fps", "Frames per second of a video."},
    {"num_inference_steps", FieldType::kInteger, FieldUse::kGeneration, 1, 1000, "--steps", "Denoising steps."},
    {"guidance_scale", FieldType::kReal, FieldUse::kGeneration, 0, 100, "--guidance",
     "Guidance scale; of guidance-distilled models the embedded one."},
    {"guidance_scale_2", FieldType::kReal, FieldUse::kGeneration, 0, 100, "--guidance-2",
     "Guidance scale of the second transformer, in models that switch between two."},
    {"true_cfg_scale", FieldType::kReal, FieldUse::kGeneration, 0, 100, "--true-cfg",
     "Scale of classifier-free guidance with a second pass per step; 1 is off."},
    {"cfg_normalization", FieldType::kReal, FieldUse::kGeneration, 0, 100, "--cfg-normalization",
     "The largest norm of a guided prediction, in norms of the prompt's own prediction; 0 is off."},
    {"cfg_truncation", FieldType::kReal, FieldUse::kGeneration, 0, 100, "--cfg-truncation",
     "Part of the noise levels, from the highest, that are guided; 1 is all."},
    {"flow_shift", FieldType::kReal, FieldUse::kGeneration, 0, 100, "--flow-shift",
     "Shift of the noise levels; above 1 more steps run at high noise levels. Replaces the scheduler's."},
    {"sampler", FieldType::kText, FieldUse::kGeneration, 0, kMaxNameBytes, "--sampler",
     "euler or unipc instead of the model's scheduler."},
    {"sigmas", FieldType::kText, FieldUse::kGeneration, 0, kMaxTextBytes, "--sigmas",
     "Noise levels of the steps before the shift, from 1 down, separated by commas. Needs the sampler euler."},
    {"cache", FieldType::kCache, FieldUse::kGeneration, 0, 1, "--cache",
     "Skips the blocks after the first one where the first one changes its input almost as before: mode first_block, "
     "with the largest change that counts so as threshold. Mode off is the default."},
    {"max_sequence_length", FieldType::kInteger, FieldUse::kGeneration, 1, 1024, "--max-sequence-length",
     "Most text tokens. The prompt is padded to exactly this length, except by Z-Image."},
    {"seed", FieldType::kInteger, FieldUse::kJob, 0, std::numeric_limits<std::int64_t>::max(), "--seed",
     "Seed of the first image; image i has seed + i. Random if left out."},
    {"loras", FieldType::kAdapters, FieldUse::kJob, 0, 16, "--lora", "LoRA adapters by name."},
    {"priority", FieldType::kInteger, FieldUse::kJob, -100, 100, "", "Higher first within a tenant; 0 if left out."},
    {"deadline_ms", FieldType::kInteger, FieldUse::kJob, 1, 7LL * 24 * 3600 * 1000, "",
     "Milliseconds from submission. A job that cannot meet it is refused with 429; one that misses it expires."},
    {"output_format", FieldType::kFormat, FieldUse::kJob, 0, 16, "",
     "File format; if left out, png for images and mp4 for videos."},
    {"output_compression", FieldType::kInteger, FieldUse::kJob, 0, 100, "",
     "Quality of JPEG, WebP and MP4; 100 if left out. PNG ignores it."},
    {"partial_images", FieldType::kInteger, FieldUse::kJob, 0, 3, "",
     "Number of previews during denoising; 0 if left out."},
    {"pause_after_steps", FieldType::kInteger, FieldUse::kJob, 1, 1000, "",
     "Pauses each image after so many denoising steps, with a preview, until POST /v1/jobs/{id}/resume."},
    {"resume_from", FieldType::kText, FieldUse::kJob, 0, 80, "",
     "Id of a paused job, or ID/UNIT, from whose checkpoint this job goes on. Fields that are left out are that job's; "
     "only the prompts, scales of guidance and adapters may differ."},
    {"webhook", FieldType::kWebhook, FieldUse::kJob, 0, 0, "",
     "URL that gets the job's end by POST, signed as Standard Webhooks say. As an object: url, and events, any of "
     "job.started, job.progress (at most one a second), job.succeeded, job.failed and job.canceled."},
    {"user", FieldType::kText, FieldUse::kJob, 0, 512, "", "Opaque label of the end user, stored with the job."},
    {"remixed_from", FieldType::kText, FieldUse::kJob, 0, 64, "",
     "Id of the video that this is a remix of, stored with the job; POST /v1/videos/{id}/remix sets it."},
});

// A row of the table. `Field("width")` is resolved at compile time; an unknown name does not compile.
class Field {
 public:
  template <std::size_t N>
  consteval Field(const char (&name)[N]) : index_(index_of({name, N - 1})) {}

  // Precondition: below the number of rows.
  static constexpr Field at(std::size_t row) { return Field(row); }

  constexpr const FieldRow& row() const { return kFieldRows[index_]; }
  constexpr std::string_view name() const { return row().name; }
  auto operator<=>(const Field&) const = default;

 private:
  constexpr explicit Field(std::size_t index) : index_(static_cast<std::uint8_t>(index)) {}
  static consteval std::uint8_t index_of(std::string_view name) {
    for (std::size_t i = 0; i < kFieldRows.size(); ++i) {
      if (kFieldRows[i].name == name) return static_cast<std::uint8_t>(i);
    }
    throw "not a field of the table";  // at compile time
  }

  std::uint8_t index_;
};

// In the table's order.
inline constexpr auto kFields = []<std::size_t... Row>(std::index_sequence<Row...>) {
  return std::array{Field::at(Row)...};
}
(std::make_index_sequence<kFieldRows.size()>());

std::optional<Field> find_field(std::string_view name);

// The generation fields of one request. A value type; a field that was not set has no value.
class FieldValues {
 public:
  using Value = std::variant<std::int64_t, double, std::string>;

  // The value, or nothing if the field is not set. Precondition: the field has this type.
  std::optional<std::int64_t> integer(Field field) const;
  std::optional<double> real(Field field) const;
  const std::string* text(Field field) const;  // valid until the field is set again

  const Value* find(Field field) const;
  bool has(Field field) const { return find(field) != nullptr; }
  // Preconditions: a generation field; the value has the field's type, or is an integer for a real field.
  void set(Field field, Value value);

  // The SHA-256 of each image of the field. Precondition: a field of type kImage.
  std::vector<std::string> images(Field field) const;

  bool operator==(const FieldValues&) const = default;

 private:
  std::map<Field, Value> values_;
};

}  // namespace ditfleet::job
