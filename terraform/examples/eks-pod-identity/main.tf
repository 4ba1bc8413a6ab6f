# Pods of the service account "engine" may read and write, those of "canary" only read. The cluster
# needs the add-on eks-pod-identity-agent; the service accounts need no annotation.

provider "aws" {
  region = "us-east-1"
}

module "kv_cache" {
  source = "../.."

  name = "my-kv-cache"

  pod_identities = {
    engine = {
      cluster_name    = var.cluster_name
      namespace       = "inference"
      service_account = "engine"
    }
    canary = {
      cluster_name    = var.cluster_name
      namespace       = "inference"
      service_account = "canary"
      access          = "reader"
    }
  }

  # As deploy/kubernetes is laid out for: its memory limits hold host_bytes, and a shutdown waits.
  settings = {
    host_bytes      = "32GiB"
    on_unavailable  = "serve"
    drain_timeout_s = 10
  }

  # Free, and no byte of the cache goes through a NAT gateway. Read what it refuses before you use
  # it: the description of the variable.
  gateway_endpoint = {
    vpc_id             = var.vpc_id
    route_table_ids    = var.route_table_ids
    extra_bucket_names = ["al2023-repos-us-east-1-*", var.model_bucket_name]
  }

  alarm_actions  = [var.alarm_topic_arn]
  max_bucket_gib = 10240

  tags = { Team = "inference" }
}

variable "cluster_name" {
  description = "Name of the EKS cluster."
  type        = string
}

variable "vpc_id" {
  description = "VPC of the GPU nodes."
  type        = string
}

variable "route_table_ids" {
  description = "Route tables of the GPU nodes' subnets."
  type        = list(string)
}

variable "model_bucket_name" {
  description = "Bucket the nodes read model weights from."
  type        = string
}

variable "alarm_topic_arn" {
  description = "SNS topic that alarms go to."
  type        = string
}

output "kv_transfer_config" {
  value = module.kv_cache.kv_transfer_config
}

output "canary_kv_transfer_config" {
  value = module.kv_cache.reader_kv_transfer_config
}
