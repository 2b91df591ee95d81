// Objects in an S3 store: AWS, or any with its API (MinIO, Ceph, Cloudflare R2 …).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shared/core/deadline.h"
#include "shared/core/http_client.h"
#include "shared/core/http_url.h"
#include "shared/core/result.h"
#include "shared/s3/credentials.h"
#include "shared/s3/options.h"

namespace ditfleet::s3 {

struct Listing {
  struct Object {
    std::string key, modified;  // modified: "2026-11-29T01:35:54.000Z"
  };
  std::vector<Object> objects;
  std::string next;        // for the next page; empty: this is the last one
  std::int64_t now_s = 0;  // the store's clock
};

// Not thread-safe: call every function on one executor, which must be single-threaded or a strand.
//
// Requests that fail for the moment are sent again, at most four times in all. An error then has the source
// kObjectStore: kUnavailable (no answer, 5xx, 429) or kResourceExhausted (507, the store is full). Errors that an
// operator has to mend, such as wrong keys or a bucket that does not exist, are kUnavailable with the source kHere.
class Client {
 public:
  explicit Client(const Options& options);

  // Stores an object. If the key exists and is not to be replaced, it stays, and put() succeeds: only one writer may
  // use such a key. `sha256`: of the bytes; the store compares it. The deadline gets a second for each 64 KiB more.
  // kPayloadTooLarge.
  asio::awaitable<Result<void>> put(std::string bucket, std::string key, std::shared_ptr<const std::string> bytes,
                                    std::string sha256, std::string media_type, bool replace, Deadline deadline);
  // At most `size` bytes from `offset` on. kNotFound; kDataCorrupt: the object ends before `offset`.
  asio::awaitable<Result<std::string>> get(std::string bucket, std::string key, std::int64_t offset, std::int64_t size,
                                           Deadline deadline);
  // Succeeds if there is no such object.
  asio::awaitable<Result<void>> remove(std::string bucket, std::string key, Deadline deadline);
  // Sets its time of modification to now. kNotFound.
  asio::awaitable<Result<void>> touch(std::string bucket, std::string key, Deadline deadline);
  // At most `most` objects whose keys begin with the prefix.
  asio::awaitable<Result<Listing>> list(std::string bucket, std::string prefix, std::string next, int most,
                                        Deadline deadline);
  // Finds credentials, or renews those that end soon. Requests do so too; links need it.
  asio::awaitable<void> keep_credentials();
  // A link to the object for everybody who has it, at most for seven days. Empty without credentials.
  std::string link(const std::string& bucket, const std::string& key, std::int64_t life_s) const;
  // "https://host" of links to the bucket.
  std::string origin(const std::string& bucket) const;

 private:
  struct Call {
    std::string method, bucket, key;
    std::map<std::string, std::string> query = {}, headers = {};  // headers by name in lower case, all signed
    std::shared_ptr<const std::string> body = {};
    // SHA-256 of the body; by default of none.
    std::string sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    std::size_t most_bytes = 64 << 10;
  };
  asio::awaitable<Result<HttpClient::Answer>> perform(Call call, Deadline deadline);
  HttpClient::Request request_of(const Call& call, const Credentials& credentials, Deadline deadline) const;
  Error error_of(const Call& call, const HttpClient::Answer& answer, const std::string& code,
                 const std::string& message) const;
  // Host and encoded path of an object.
  std::pair<std::string, std::string> place_of(const std::string& bucket, const std::string& key) const;
  std::int64_t now_s() const;  // by the store's clock, once it has refused ours

  std::string endpoint_, region_, addressing_;
  HttpUrl url_;  // of endpoint_
  HttpClient http_;
  CredentialChain credentials_;
  std::int64_t ahead_s_ = 0;  // of the store's clock
};

// "https://s3.eu-west-1.amazonaws.com", with the options' or the environment's region.
std::string endpoint_of(const Options& options);

}  // namespace ditfleet::s3
