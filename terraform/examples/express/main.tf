# A directory bucket in the zone of the GPU nodes. Read "Express" in the module's README first.

provider "aws" {
  region = "us-east-1"
}

module "kv_cache" {
  source = "../.."

  name                 = "my-kv-cache"
  storage              = "express"
  availability_zone_id = "use1-az4"
  expiration_days      = 1
}

output "bucket" {
  value = module.kv_cache.bucket
}

output "writer_policy_arn" {
  value = module.kv_cache.writer_policy_arn
}

output "kv_transfer_config" {
  value = module.kv_cache.kv_transfer_config
}
