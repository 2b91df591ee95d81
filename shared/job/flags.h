// The fields of a job as command-line flags. No side effects; thread-safe.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/fields.h"
#include "shared/job/spec.h"

namespace ditfleet::job {

// The texts of the flags, by field. Files of a repeated flag are separated by line feeds.
using FieldFlags = std::map<Field, std::string>;

// Adds the flags of all fields to a CLI11 command, except for adapters, which the commands read differently. The prompt
// is required unless `needs_prompt` is false; with `positional_prompt` its flag may be omitted, and the command must
// check that there is a prompt. `texts` must outlive the parsing. Values are read as text, because CLI11 saturates
// large integers and drops empty texts.
template <class Command>
void add_field_flags(Command& command, FieldFlags& texts, bool positional_prompt, bool needs_prompt = true) {
  for (const Field field : kFields) {
    const FieldRow& row = field.row();
    if (row.flag.empty() || row.type == FieldType::kAdapters) continue;
    if (row.type == FieldType::kFlag) {
      command.add_flag_callback(
          std::string(row.flag), [&texts, field] { texts[field] = "false"; }, std::string(row.description));
      continue;
    }
    if (row.type == FieldType::kImage) {
      command
          .template add_option_function<std::vector<std::string>>(
              std::string(row.flag),
              [&texts, field](const std::vector<std::string>& files) {
                for (const std::string& file : files) texts[field] += (texts[field].empty() ? "" : "\n") + file;
              },
              std::string(row.description.substr(0, row.description.find(':'))) +
                  ": a PNG, JPEG, WebP, BMP or GIF file" + (row.high > 1 ? "; repeatable" : ""))
          ->type_name("FILE")
          ->expected(1, static_cast<int>(row.high))
          ->allow_extra_args(false);
      continue;
    }
    const bool prompt = field == Field("prompt");
    command
        .template add_option_function<std::string>(
            (prompt && positional_prompt ? "prompt," : "") + std::string(row.flag),
            [&texts, field](const std::string& text) { texts[field] = text; }, std::string(row.description))
        ->type_name(row.type == FieldType::kSize    ? "WxH"
                    : row.type == FieldType::kText  ? "TEXT"
                    : row.type == FieldType::kCache ? "MODE[:THRESHOLD]"
                                                    : "NUMBER")
        ->required(prompt && needs_prompt && !positional_prompt);
  }
}

// The files of a field of images.
std::vector<std::string> files_of(const std::string& text);

// Returns the fields as a job's JSON. The texts of images are their SHA-256 instead of files. The extension of the file
// `out` sets the output format; without an extension the default applies. Does not check bounds; parse_spec does.
// kInvalidArgument (the message contains the flag): invalid UTF-8, an invalid number, or an unknown extension.
Result<json::object> body_of(const FieldFlags& texts, const std::string& out_flag, const std::string& out);

// Prefixes the message with the flag of the field error.param, if it has a flag.
Error name_the_flag(Error error);

// Parses NAME[:SCALE][:EXPERT]. SCALE defaults to 1, EXPERT (high, low or both) to both. Nothing if the text after the
// last colon is neither an expert nor a number from -kMaxLoraScale to kMaxLoraScale, or if the one before an expert is
// no such number.
std::optional<LoraUse> parse_lora_flag(std::string_view text);

// The path of image `index` of `count`: "out.png" if count is 1, otherwise "out-<index + 1>.png".
std::string numbered_path(const std::string& path, int index, int count);

}  // namespace ditfleet::job
