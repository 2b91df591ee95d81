// Renders settings and the option table: YAML for `config show`, rows for --help, Markdown for REFERENCE.md.
#include <yaml-cpp/yaml.h>

#include <algorithm>

#include "shared/config/edit.h"
#include "shared/config/lists.h"
#include "shared/config/options.h"
#include "shared/config/settings.h"

namespace ditfleet::config {
namespace {

std::string section_of(std::string_view key) {
  const auto dot = key.find('.');
  return dot == std::string_view::npos ? std::string() : std::string(key.substr(0, dot));
}

std::string without_password(const std::string& url) {
  const auto start = url.find("://");
  const auto at = url.rfind('@');
  if (start == std::string::npos || at == std::string::npos || at < start) return url;
  const auto colon = url.find(':', start + 3);
  if (colon == std::string::npos || colon > at) return url;
  return url.substr(0, colon + 1) + "***" + url.substr(at);
}

bool is_text(const Option& option) { return std::holds_alternative<std::string& (*)(Settings&)>(option.at); }

void emit_options(YAML::Emitter& out, const Settings& settings, bool with_secrets) {
  std::string open;
  for (const Option& option : options()) {
    const std::string section = section_of(option.key);
    if (section != open) {
      if (!open.empty()) {
        emit_lists(out, settings, open);
        out << YAML::EndMap;
      }
      if (!section.empty()) out << YAML::Key << section << YAML::Value << YAML::BeginMap;
      open = section;
    }
    const std::string name(section.empty() ? option.key : option.key.substr(section.size() + 1));
    std::string value = value_text(option, settings);
    if (option.form == Form::kRedisUrl && !with_secrets) value = without_password(value);
    const bool secret = option.form == Form::kSecret || option.form == Form::kPassword;
    if (secret && !with_secrets && !value.empty()) value = "***";
    out << YAML::Key << name << YAML::Value;
    if (is_text(option))
      out << YAML::DoubleQuoted << value;
    else
      out << value;
  }
  if (!open.empty()) {
    emit_lists(out, settings, open);
    out << YAML::EndMap;
  }
}

}  // namespace

std::string to_yaml(const Settings& settings, bool with_secrets) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  emit_options(out, settings, with_secrets);
  out << YAML::Key << "models" << YAML::Value << YAML::BeginMap;
  for (const auto& [name, model] : settings.models) {
    out << YAML::Key << YAML::DoubleQuoted << name << YAML::Value;
    emit_model(out, model);
  }
  out << YAML::EndMap << YAML::Key << "tenants" << YAML::Value << YAML::BeginMap;
  for (const auto& [name, tenant] : settings.tenants) {
    out << YAML::Key << YAML::DoubleQuoted << name << YAML::Value << YAML::BeginMap;
    out << YAML::Key << "weight" << YAML::Value << tenant.weight;
    for (const auto& [option, value] : tenant.own) out << YAML::Key << option << YAML::Value << value;
    out << YAML::EndMap;
  }
  out << YAML::EndMap << YAML::Key << "keys" << YAML::Value << YAML::BeginSeq;
  for (const ApiKey& key : settings.keys) {
    out << YAML::BeginMap << YAML::Key << "tenant" << YAML::Value << YAML::DoubleQuoted << key.tenant;
    out << YAML::Key << "sha256" << YAML::Value << YAML::DoubleQuoted << key.sha256;
    out << YAML::Key << "admin" << YAML::Value << key.admin << YAML::EndMap;
  }
  out << YAML::EndSeq << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

std::vector<OptionHelp> option_table() {
  const Settings defaults;
  std::vector<OptionHelp> rows;
  for (const Option& option : options()) {
    rows.push_back({std::string(option.key), type_text(option), value_text(option, defaults),
                    std::string(option.description), environment_name(option.key)});
  }
  // Insert each list after the last option of its section.
  for (const OptionHelp& list : list_help()) {
    const std::string section = section_of(list.key);
    const auto after =
        std::find_if(rows.rbegin(), rows.rend(), [&](const OptionHelp& row) { return section_of(row.key) == section; });
    rows.insert(after.base(), list);
  }
  rows.push_back({"models.NAME.path", "path", "",
                  "Folder, in diffusers' layout, of the model that requests call NAME; or known:NAME, a "
                  "model whose configuration and tokenizers DiTFleet ships; or hf:ORG/NAME, which is looked for in the "
                  "local cache of Hugging Face's hub. models.NAME=FOLDER is the same.",
                  "DITFLEET_MODELS__NAME__PATH"});
  rows.push_back(
      {"models.NAME.transformer", "path", "",
       "A safetensors or GGUF file with the transformer's weights, in place of the folder's: in the names of "
       "diffusers, of ComfyUI or of the model's own code, perhaps with other components in the same file. "
       "transformer_2, text_encoder, text_encoder_2, image_encoder and vae are the same for these components.",
       "DITFLEET_MODELS__NAME__TRANSFORMER"});
  rows.push_back(
      {"models.NAME.quantize", "a map of formats by component", "",
       "Components to quantize while they are loaded: transformer to fp8 or nf4, text_encoder and "
       "text_encoder_2 to nf4. As text: \"transformer=fp8,text_encoder_2=nf4\". auto: what the device's memory "
       "requires, so that no block has to be copied in each step: nothing, else fp8 where the device has "
       "it, else nf4.",
       "DITFLEET_MODELS__NAME__QUANTIZE"});
  rows.push_back(
      {"models.NAME.vae_dtype", "fp32 or bf16", "worker.dtype",
       "Precision of the VAE, where the model's family can load it apart. Videos are usually decoded in fp32 "
       "by models in bf16, which costs memory and time.",
       "DITFLEET_MODELS__NAME__VAE_DTYPE"});
  rows.push_back({"models.NAME.attention", "fp8", "worker.dtype",
                  "fp8: self-attention in 8 bits, which is faster and less exact. Needs compiled blocks and, on a GPU, "
                  "FlashAttention-3; without them a warning is logged and attention is in worker.dtype.",
                  "DITFLEET_MODELS__NAME__ATTENTION"});
  rows.push_back({"models.NAME.objective_s", "a number from 0 to 1000000", "0",
                  "Objective: the time from submission in which a job of the model should end, in seconds. Jobs that "
                  "meet and miss it are counted in ditfleet_objective_jobs_total. 0: no objective.",
                  "DITFLEET_MODELS__NAME__OBJECTIVE_S"});
  rows.push_back({"tenants.NAME.weight", "a number from 0.001 to 1000", "1",
                  "Weight of the tenant's share of the fleet while several tenants have waiting jobs.",
                  "DITFLEET_TENANTS__NAME__WEIGHT"});
  rows.push_back({"tenants.NAME.QUOTA", "as quotas.QUOTA", "",
                  "The tenant's own value of an option of section quotas, such as queued_units.",
                  "DITFLEET_TENANTS__NAME__QUOTA"});
  rows.push_back({"tenants.NAME.webhook_url", "as webhooks.url", "",
                  "The tenant's own value of webhooks.url; webhook_hosts is the same for webhooks.hosts.",
                  "DITFLEET_TENANTS__NAME__WEBHOOK_URL"});
  rows.push_back({"tenants.NAME.s3_inputs", "as results.s3.inputs", "", "The tenant's own value of results.s3.inputs.",
                  "DITFLEET_TENANTS__NAME__S3_INPUTS"});
  rows.push_back({"keys[].tenant", "a name", "",
                  "Tenant that the bearer key belongs to. Without any keys the only tenant is `default`, and requests "
                  "need no key.",
                  ""});
  rows.push_back({"keys[].sha256", "64 hexadecimal digits", "",
                  "SHA-256 of the bearer key. Keys themselves are never stored.", ""});
  rows.push_back({"keys[].admin", "true or false", "false",
                  "The key may see and cancel every tenant's jobs and manage their adapters.", ""});
  return rows;
}

std::string reference_markdown() {
  std::string out =
      "# Configuration reference\n\n"
      "Generated by `ditfleet config reference`; do not edit. A value comes from the first of these sources that has "
      "it:\n"
      "flags and `--set key=value`; the environment (`DITFLEET_SECTION__KEY`); the file (`--config`, else "
      "`DITFLEET_CONFIG`);\n"
      "the default. Unknown keys are errors. Relative paths in a file are relative to the file's folder, those in "
      "other\n"
      "sources to the working directory.\n"
      "`ditfleet config check` reports errors in a configuration, and `ditfleet config show` prints the effective "
      "one.\n";
  std::string open = "-";
  for (const OptionHelp& row : option_table()) {
    std::string section = section_of(row.key);
    if (row.key.starts_with("keys[]")) section = "keys";
    if (section != open) {
      out += "\n## " + (section.empty() ? std::string("Top level") : section) +
             "\n\n| key | value | default | meaning |\n|---|---|---|---|\n";
      open = section;
    }
    out += "| `" + row.key + "` | " + row.type + " | " +
           (row.default_value.empty() ? "" : "`" + row.default_value + "`") + " | " + row.description + " |\n";
  }
  return out;
}

}  // namespace ditfleet::config
