# A bucket and two policies. Attach the writer's policy to whatever runs vLLM.

provider "aws" {
  region = "us-east-1"
}

module "kv_cache" {
  source = "../.."

  name = "my-kv-cache"
}

output "writer_policy_arn" {
  value = module.kv_cache.writer_policy_arn
}

# vllm serve my-model --kv-transfer-config "$(terraform output -raw kv_transfer_config)"
output "kv_transfer_config" {
  value = module.kv_cache.kv_transfer_config
}
