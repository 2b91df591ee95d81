// How an S3 store is reached.
#pragma once

#include <string>

namespace ditfleet::s3 {

struct Options {
  std::string endpoint;             // "https://minio.example:9000"; empty: AWS in the region
  std::string region;               // empty: AWS_REGION, AWS_DEFAULT_REGION or us-east-1
  std::string addressing = "auto";  // path (HOST/BUCKET/KEY), virtual (BUCKET.HOST/KEY), auto: virtual at AWS
};

}  // namespace ditfleet::s3
