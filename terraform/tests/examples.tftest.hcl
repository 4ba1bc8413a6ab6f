# The real provider with keys that open nothing: it renders every policy while planning, offline.
provider "aws" {
  region                      = "eu-west-1"
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

override_data {
  target = module.kv_cache.data.aws_caller_identity.current
  values = { account_id = "111122223333" }
}

run "minimal" {
  command = plan

  module {
    source = "./examples/minimal"
  }

  assert {
    condition     = jsondecode(output.kv_transfer_config).kv_connector_extra_config.bucket == "my-kv-cache"
    error_message = "the example must print what vLLM is to be given"
  }
}

run "eks_pod_identity" {
  command = plan

  module {
    source = "./examples/eks-pod-identity"
  }

  variables {
    cluster_name      = "gpu"
    vpc_id            = "vpc-1"
    route_table_ids   = ["rtb-1"]
    model_bucket_name = "models"
    alarm_topic_arn   = "arn:aws:sns:us-east-1:111122223333:pager"
  }

  assert {
    condition     = jsondecode(output.kv_transfer_config).kv_connector_extra_config.bucket == "my-kv-cache"
    error_message = "the example must print what vLLM is to be given"
  }
}

run "eks_irsa" {
  command = plan

  module {
    source = "./examples/eks-irsa"
  }

  variables {
    oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/oidc.eks.us-east-1.amazonaws.com/id/ABC"
  }

  assert {
    condition     = jsondecode(output.kv_transfer_config).kv_connector_extra_config.bucket == "my-kv-cache"
    error_message = "the example must print what vLLM is to be given"
  }
}

run "express" {
  command = plan

  module {
    source = "./examples/express"
  }

  assert {
    condition     = output.bucket == "my-kv-cache--use1-az4--x-s3"
    error_message = "the bucket must be named by its zone"
  }
}

run "kms" {
  command = plan

  module {
    source = "./examples/kms"
  }

  assert {
    condition     = jsondecode(output.kv_transfer_config).kv_connector_extra_config.bucket == "my-kv-cache"
    error_message = "the example must print what vLLM is to be given"
  }
}
